"""Finding a snapshot's folder and checking its files before anything is mapped."""

from collections.abc import Iterable
from pathlib import Path

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import CURRENT, MANIFEST, is_safe_name, shard_folder
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.publish import read_current, read_manifest
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.writer import sha256_of


def find_snapshot(path: Path, pin: str | None = None) -> tuple[Path, Manifest]:
    """The folder and manifest of what path means: a snapshot's own folder, or a snapshots folder's live or pinned one.

    Raises SnapshotError, one line, if there is none or its manifest is wrong.
    """
    if pin is None and (path / MANIFEST).is_file():
        # A copy under another folder name is fine: the manifest guards itself.
        return path, Manifest.parse((path / MANIFEST).read_bytes(), str(path / MANIFEST))
    if not path.is_dir():
        raise SnapshotError(f"there is no folder {path}; give a snapshots folder or one snapshot's folder")
    storage = LocalStorage(path)
    if pin is not None:
        if not is_safe_name(pin):
            raise SnapshotError(f"pin {pin!r} is no snapshot id")
        return path / pin, read_manifest(storage, pin)
    current = read_current(storage)
    if current is None:
        raise SnapshotError(f"{path} has neither {CURRENT} nor {MANIFEST}: no snapshot was published there yet")
    try:
        return path / current, read_manifest(storage, current)
    except SnapshotError as error:
        raise SnapshotError(f"{path / CURRENT} names {current!r}, which can't be opened: {error}") from None


def check_files(folder: Path, manifest: Manifest, shards: Iterable[int], hashes: bool) -> None:
    """Checks the files of some shards against the manifest: sizes, and hashes if asked. Raises SnapshotError."""
    held = {shard_folder(shard, manifest.shards) for shard in shards}
    for entry in manifest.files:
        if entry.path.split("/")[0] not in held:
            continue
        path = folder / entry.path
        try:
            size = path.stat().st_size
        except OSError:
            raise SnapshotError(f"{path} is missing; copy or export the snapshot again") from None
        if size != entry.bytes:
            raise SnapshotError(
                f"{path} has {size} bytes, its manifest says {entry.bytes}; copy or export the snapshot again"
            )
        if hashes and sha256_of(path) != entry.sha256:
            raise SnapshotError(f"{path} is damaged, its sha256 is not the manifest's; copy or export it again")
