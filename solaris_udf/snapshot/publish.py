"""Publishing: a finished staging folder becomes a snapshot, and `CURRENT` moves to it. Killed at any step, readers keep
the old snapshot whole."""

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import CURRENT, MANIFEST, is_safe_name
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.writer import sha256_of


def read_current(storage: LocalStorage) -> str | None:
    """The id that CURRENT names; None without a CURRENT. Raises SnapshotError if it is empty or no id."""
    text = storage.read_text(CURRENT)
    if text is None:
        return None
    name = text.strip()
    if not is_safe_name(name):
        what = "is empty" if not name else f"does not hold a snapshot id: {name[:80]!r}"
        raise SnapshotError(f"{storage.root / CURRENT} {what}; roll back to a snapshot or export one")
    return name


def read_manifest(storage: LocalStorage, name: str) -> Manifest:
    """The manifest of one snapshot below the root. Raises SnapshotError if it is missing or wrong."""
    where = storage.root / name / MANIFEST
    text = storage.read_text(f"{name}/{MANIFEST}")
    if text is None:
        raise SnapshotError(f"there is no snapshot {name!r} below {storage.root}: {where} does not exist")
    manifest = Manifest.parse(text, str(where))
    if not name.startswith(".") and manifest.snapshot_id != name:
        raise SnapshotError(f"{where} belongs to snapshot {manifest.snapshot_id!r}, not to {name!r}")
    return manifest


def list_snapshots(storage: LocalStorage) -> list[str]:
    """The ids of the folders that hold a manifest, sorted, so by slice."""
    return [name for name in storage.folders() if is_safe_name(name) and storage.exists(f"{name}/{MANIFEST}")]


def set_current(storage: LocalStorage, name: str) -> None:
    """Moves CURRENT to an existing snapshot, at once. Hold the storage's lock."""
    read_manifest(storage, name)
    storage.replace_text(CURRENT, name + "\n")


def publish(storage: LocalStorage, staging: str, manifest: Manifest) -> bool:
    """Turns the staging folder, complete but for its manifest, into a snapshot and moves CURRENT to it.

    CURRENT moves unless the live snapshot is of a later as_of: exporting an old slice again must not roll the pointer
    back. Returns whether CURRENT names this snapshot afterwards. If a snapshot of the same id, so the same content, is
    there already, the staging folder is dropped: publishing twice, or from two processes, gives the same result.
    """
    name = manifest.snapshot_id
    storage.write_text(f"{staging}/{MANIFEST}", manifest.to_json())
    with storage.lock():
        if storage.exists(f"{name}/{MANIFEST}") and _same(storage, name, manifest):
            storage.remove_folder(staging)
        else:
            storage.remove_folder(name)  # a damaged one of the same name; does nothing if there is none
            storage.rename_folder(staging, name)
        live = _live_as_of(storage)
        if live is not None and live > manifest.as_of_micros:
            return False
        if storage.read_text(CURRENT) != name + "\n":
            set_current(storage, name)
        return True


def reuse_files(storage: LocalStorage, staging: str, manifest: Manifest, previous: Manifest) -> int:
    """Puts the previous snapshot's own files in place of equal ones of the staging folder, so that shards that did not
    change take no room of their own. Returns the bytes shared.

    A file is linked only if its bytes still have the hash; a disk that can't link keeps the new file.
    """
    before = {file.path: file for file in previous.files}
    shared = 0
    for file in manifest.files:
        path = storage.root / previous.snapshot_id / file.path
        if before.get(file.path) == file and path.is_file() and sha256_of(path) == file.sha256:
            shared += file.bytes * storage.share_file(f"{previous.snapshot_id}/{file.path}", f"{staging}/{file.path}")
    return shared


def _same(storage: LocalStorage, name: str, manifest: Manifest) -> bool:
    """Whether the existing folder has this very manifest and all its files at their sizes."""
    if storage.read_text(f"{name}/{MANIFEST}") != manifest.to_json():
        return False
    sizes = {file.path: storage.root / name / file.path for file in manifest.files}
    return all(sizes[file.path].is_file() and sizes[file.path].stat().st_size == file.bytes for file in manifest.files)


def _live_as_of(storage: LocalStorage) -> int | None:
    """as_of of the live snapshot; None if there is none or CURRENT is broken, which a new snapshot repairs."""
    try:
        name = read_current(storage)
        return None if name is None else read_manifest(storage, name).as_of_micros
    except SnapshotError:
        return None
