"""The model folder: model.json beside torch.export programs. Reading a description needs no torch.

    my-model/
      model.json         format version, name, embedding_dim, inputs, heads, costs, sha256 of every file; written last
      user_encoder.pt2   users -> state                         once per user
      pair_head.pt2      state, user_index, items -> (embedding [P, d], logits [P, T])   once per pair

or, for a model that can't be split (slower, the user part runs again for each batch of pairs):

      pair_model.pt2     users, user_index, items -> (embedding [P, d], logits [P, T])
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from solaris_udf.foundation.features import SEQUENCES, Feature, ModelError, check_names

FORMAT_VERSION = 1
DESCRIPTION_FILE = "model.json"
SPLIT_FILES = ("user_encoder.pt2", "pair_head.pt2")
UNSPLIT_FILES = ("pair_model.pt2",)
DEFAULT_LENGTH = 50


@dataclass(frozen=True)
class Description:
    """What model.json says. `version` is what tables store as model_version.

    lengths: how many events of each sequence the model looks at, the latest ones. dense: width of item_dense, 0 if not
    used. flops_per_user / flops_per_pair: what one user and one pair cost; an unsplit model has no cost per user.
    """

    name: str
    version: str
    embedding_dim: int
    inputs: tuple[Feature, ...]
    lengths: Mapping[str, int]
    dense: int
    heads: tuple[str, ...]
    flops_per_user: float
    flops_per_pair: float
    files: Mapping[str, str]

    @property
    def split(self) -> bool:
        return set(SPLIT_FILES) <= set(self.files)

    def names(self, side: str) -> tuple[str, ...]:
        """Names of the inputs of a side: user or item."""
        return tuple(feature.name for feature in self.inputs if feature.side == side)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_description(
    folder: Path,
    *,
    name: str,
    embedding_dim: int,
    inputs: Sequence[str],
    heads: Sequence[str],
    dense: int = 0,
    lengths: Mapping[str, int] | None = None,
    flops_per_user: float = 0.0,
    flops_per_pair: float = 0.0,
) -> Description:
    """Hashes the programs in the folder and writes model.json, which makes it a model. Returns it, read back."""
    present = [file for file in (*SPLIT_FILES, *UNSPLIT_FILES) if (folder / file).is_file()]
    content = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "embedding_dim": embedding_dim,
        "inputs": [
            {
                "name": feature.name,
                "dtype": feature.dtype,
                "shape": [dense if axis == "dense" else axis for axis in feature.shape],
            }
            for feature in check_names(inputs)
        ],
        "lengths": {sequence: (lengths or {}).get(sequence, DEFAULT_LENGTH) for sequence in SEQUENCES},
        "heads": list(heads),
        "flops_per_user": flops_per_user,
        "flops_per_pair": flops_per_pair,
        "files": {file: sha256_of(folder / file) for file in present},
    }
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    parse_description(text.encode(), str(folder))
    partial = folder / f".{DESCRIPTION_FILE}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / DESCRIPTION_FILE)
    return load_description(folder)


def read_description(path: str | Path, roots: Sequence[str | Path] | None = None) -> Description:
    """The declaration of a model folder, for those who don't read the programs beside it.

    With roots, a folder outside all of them is refused. Raises ModelError that says what is wrong and where.
    """
    folder = Path(path)
    real = folder.resolve()
    if roots is not None and not any(real.is_relative_to(Path(root).resolve()) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise ModelError(f"model folder {folder} lies outside the allowed roots: {allowed}")
    try:
        raw = (folder / DESCRIPTION_FILE).read_bytes()
    except OSError as error:
        raise ModelError(f"{folder} is no model folder: {DESCRIPTION_FILE}: {error.strerror}") from None
    return parse_description(raw, str(folder))


def load_description(path: str | Path, roots: Sequence[str | Path] | None = None) -> Description:
    """read_description, and verifies the hash of every file. Nothing of it is deserialized. Raises ModelError."""
    description = read_description(path, roots)
    folder = Path(path)
    real = folder.resolve()
    for name, expected in description.files.items():
        file = folder / name
        if not file.resolve().is_relative_to(real):
            raise ModelError(f"{folder}: file {name} lies outside the folder")
        if not file.is_file():
            raise ModelError(f"{folder}: file {name} is missing")
        if sha256_of(file) != expected:
            raise ModelError(f"{folder}: file {name} does not match its hash in {DESCRIPTION_FILE}; copy it again")
    return description


def parse_description(raw: bytes, place: str) -> Description:
    """The description in the bytes of a model.json; place is for messages. Checks everything but the files' hashes."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{place}: {DESCRIPTION_FILE} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{place}: {DESCRIPTION_FILE} must hold an object")
    if content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version")
        raise ModelError(f"{place}: format_version is {found!r}, this code reads {FORMAT_VERSION}")
    try:
        files = _files(content["files"])
        inputs, dense = _inputs(content["inputs"])
        lengths = {sequence: _count(content["lengths"][sequence], f"lengths.{sequence}") for sequence in SEQUENCES}
        heads = tuple(_text(head, "heads") for head in content["heads"])
        return Description(
            name=_text(content["name"], "name"),
            version=hashlib.sha256(raw).hexdigest()[:12],
            embedding_dim=_count(content["embedding_dim"], "embedding_dim"),
            inputs=inputs,
            lengths=lengths,
            dense=dense,
            heads=heads,
            flops_per_user=_cost(content["flops_per_user"], "flops_per_user"),
            flops_per_pair=_cost(content["flops_per_pair"], "flops_per_pair"),
            files=files,
        )
    except KeyError as error:
        raise ModelError(f"{place}: {DESCRIPTION_FILE} lacks {error}") from None
    except (ModelError, TypeError) as error:
        raise ModelError(f"{place}: {DESCRIPTION_FILE}: {error}") from None


def _files(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ModelError("files must map names to sha256")
    for name in value:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ModelError(f"file {name!r} must lie inside the folder")
    if not (set(SPLIT_FILES) <= set(value) or set(UNSPLIT_FILES) <= set(value)):
        wanted = f"{' and '.join(SPLIT_FILES)}, or {UNSPLIT_FILES[0]}"
        raise ModelError(f"files must hold {wanted}; it holds {sorted(value)}")
    return {_text(name, "files"): _text(digest, f"files.{name}") for name, digest in value.items()}


def _inputs(value: Any) -> tuple[tuple[Feature, ...], int]:
    entries = {_text(entry["name"], "inputs"): entry for entry in value}
    features = check_names(entries)
    dense = 0
    for feature in features:
        entry = entries[feature.name]
        if entry["dtype"] != feature.dtype:
            raise ModelError(f"input {feature.name} is {feature.dtype}, not {entry['dtype']}")
        shape = tuple(entry["shape"])
        if feature.name == "item_dense" and len(shape) == 2:
            dense = _count(shape[1], "the width of item_dense")
            shape = (shape[0], "dense")
        if shape != feature.shape:
            raise ModelError(f"input {feature.name} has shape {list(feature.shape)}, not {entry['shape']}")
    return features, dense


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ModelError(f"{what} must be text, not {value!r}")
    return value


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{what} must be a whole number of at least 1, not {value!r}")
    return value


def _cost(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ModelError(f"{what} must be a number of at least 0, not {value!r}")
    return float(value)
