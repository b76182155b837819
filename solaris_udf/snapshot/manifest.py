"""manifest.json: what a snapshot holds, and the hash of every file. Written last; its hash names the folder."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solaris_udf.codec import CODECS, bytes_per_vector
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import FORMAT, FORMAT_MAJOR, FORMAT_MINOR, expected_files, is_safe_name
from solaris_udf.tiers import TierPolicy


@dataclass(frozen=True)
class FileEntry:
    """One file: path below the snapshot's folder, rows, size, hash, and the rows of its longest bucket."""

    path: str
    rows: int
    bytes: int
    sha256: str
    longest_bucket: int = 0


@dataclass(frozen=True)
class Manifest:
    """The manifest of one snapshot.

    as_of_micros: microseconds since 1970 UTC. mean_norm: mean L2 norm of the pair vectors, 0 without any. minor: the
    least minor version of the format that has all its keys.
    """

    slice: str
    as_of_micros: int
    model_version: str
    dim: int
    codec: str
    shards: int
    neighbors: int
    policy: TierPolicy
    pairs: int
    users_own: int
    users_neighbor: int
    mean_norm: float
    files: tuple[FileEntry, ...]
    users_cold: int = 0
    minor: int = 0

    @property
    def width(self) -> int:
        """Bytes of one stored vector."""
        return bytes_per_vector(self.dim, self.codec)

    @property
    def total_bytes(self) -> int:
        """Size of all data files."""
        return sum(file.bytes for file in self.files)

    @property
    def users(self) -> int:
        return self.users_embedded + self.users_cold

    @property
    def users_embedded(self) -> int:
        """Users with a mean of their own or of a neighbour."""
        return self.users_own + self.users_neighbor

    @property
    def content_hash(self) -> str:
        """sha256 of the canonical JSON of everything but the id, so of every file's hash too."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def snapshot_id(self) -> str:
        """`<slice>-<model_version>-<first 8 of the content hash>`: the same content has the same id."""
        return f"{self.slice}-{self.model_version}-{self.content_hash[:8]}"

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": f"{FORMAT_MAJOR}.{self.minor}",
            "slice": self.slice,
            "as_of_micros": self.as_of_micros,
            "model_version": self.model_version,
            "dim": self.dim,
            "codec": self.codec,
            "hash": "xxh64 seed 42",
            "shards": self.shards,
            "neighbors": self.neighbors,
            "tiers": {
                "order": list(self.policy.order),
                "ttl_micros": self.policy.ttl_micros,
                "max_user_age_micros": self.policy.max_user_age_micros,
                "min_similarity": float(self.policy.min_similarity),
            },
            "counts": {
                "pairs": self.pairs,
                "users_own": self.users_own,
                "users_neighbor": self.users_neighbor,
                **({"users_cold": self.users_cold} if self.users_cold else {}),
            },
            "mean_norm": float(self.mean_norm),
            "files": [
                {
                    "path": file.path,
                    "rows": file.rows,
                    "bytes": file.bytes,
                    "sha256": file.sha256,
                    "longest_bucket": file.longest_bucket,
                }
                for file in self.files
            ],
        }

    def to_json(self) -> str:
        """The file's text. The same content gives the same bytes."""
        content = {"snapshot_id": self.snapshot_id, "content_hash": self.content_hash, **self._content()}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> "Manifest":
        """Reads and checks a manifest. where names it in errors.

        Raises SnapshotError for anything but a manifest of this format and major version that matches its own hash.
        """
        try:
            raw = json.loads(text)
        except (ValueError, UnicodeDecodeError) as error:
            raise SnapshotError(f"{where} is not valid JSON: {str(error).splitlines()[0]}") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise SnapshotError(f"{where} is not a snapshot manifest: its format is not {FORMAT!r}")
        minor = _minor_version(raw.get("format_version"), where)
        try:
            manifest = cls._of(raw, minor)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            fault = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise SnapshotError(f"{where} is not a valid manifest: {fault}") from None
        # A later minor version may have keys that this reader does not know; only the files' own hashes guard it then.
        if minor <= FORMAT_MINOR and raw.get("content_hash") != manifest.content_hash:
            raise SnapshotError(f"{where} was changed after it was written: it does not match its own content_hash")
        return manifest

    @classmethod
    def _of(cls, raw: Mapping[str, Any], minor: int) -> "Manifest":
        tiers, counts = raw["tiers"], raw["counts"]
        manifest = cls(
            slice=_text(raw, "slice"),
            as_of_micros=_integer(raw, "as_of_micros", None),
            model_version=_text(raw, "model_version"),
            dim=_integer(raw, "dim", 1),
            codec=_text(raw, "codec"),
            shards=_integer(raw, "shards", 1),
            neighbors=_integer(raw, "neighbors", 1),
            policy=TierPolicy(
                tuple(tiers["order"]),
                _integer(tiers, "ttl_micros", 1),
                _integer(tiers, "max_user_age_micros", 1),
                float(tiers["min_similarity"]),
            ),
            pairs=_integer(counts, "pairs", 0),
            users_own=_integer(counts, "users_own", 0),
            users_neighbor=_integer(counts, "users_neighbor", 0),
            users_cold=_integer({"users_cold": 0, **counts}, "users_cold", 0),
            mean_norm=float(raw["mean_norm"]),
            files=tuple(
                FileEntry(
                    _text(file, "path"),
                    _integer(file, "rows", 0),
                    _integer(file, "bytes", 0),
                    _text(file, "sha256"),
                    _integer(file, "longest_bucket", 0),
                )
                for file in raw["files"]
            ),
            minor=minor,
        )
        if manifest.codec not in CODECS:
            raise ValueError(f"unknown codec {manifest.codec!r}; codecs: {', '.join(CODECS)}")
        if not is_safe_name(f"{manifest.slice}-{manifest.model_version}"):
            raise ValueError(f"slice {manifest.slice!r} and model_version {manifest.model_version!r} can't be a name")
        # Exactly the names of the format: so no path can leave the folder, and no shard can be missing.
        expected, listed = set(expected_files(manifest.shards)), [file.path for file in manifest.files]
        foreign = sorted(set(listed) - expected)
        if foreign:
            raise ValueError(f"it names a file that is no part of a snapshot: {foreign[0]!r}")
        missing = sorted(expected - set(listed))
        if missing:
            raise ValueError(f"it does not list {missing[0]!r}")
        if len(listed) != len(expected):
            raise ValueError("it lists a file twice")
        return manifest


def _minor_version(value: object, where: str) -> int:
    parts = value.split(".") if isinstance(value, str) else []
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise SnapshotError(f"{where} has format_version {value!r}, which is not MAJOR.MINOR")
    major, minor = int(parts[0]), int(parts[1])
    if major != FORMAT_MAJOR:
        raise SnapshotError(
            f"{where} has format version {value}; this reader knows {FORMAT_MAJOR}.x: "
            + ("upgrade solaris-pipeline where it is read" if major > FORMAT_MAJOR else "export it again")
        )
    return minor


def _integer(raw: Mapping[str, Any], key: str, least: int | None) -> int:
    value = raw[key]
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    if not known or (least is not None and value < least):
        raise ValueError(f"{key} is {value!r}, must be an integer" + ("" if least is None else f" of at least {least}"))
    return int(value)


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is {value!r}, must be a text")
    return value
