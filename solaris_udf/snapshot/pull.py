"""Snapshots from an object store to this host's disk, where they are memory-mapped. Needs numpy and pyarrow only.

The store holds what a snapshots folder holds: SNAPSHOT/manifest.json, SNAPSHOT/shard-.../..., and CURRENT, moved last.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import CURRENT, MANIFEST, STAGING_PREFIX, is_safe_name
from solaris_udf.snapshot.manifest import FileEntry, Manifest
from solaris_udf.snapshot.opening import check_files
from solaris_udf.snapshot.publish import publish, read_current, read_manifest, set_current
from solaris_udf.snapshot.storage import LocalStorage

THREADS = 8
PULL_LOCK, PULL_SECONDS = ".pull.lock", 3600  # how long one process waits for another one's fetch


def open_store(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI, and the folder in it. For s3://BUCKET/PREFIX credentials, region and endpoint come from
    the AWS_* environment or an instance role. Raises SnapshotError if it is no URI that pyarrow knows."""
    try:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if uri.startswith("s3://") and endpoint:
            return fs.S3FileSystem(endpoint_override=endpoint), uri.removeprefix("s3://").rstrip("/")
        store, folder = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{uri} is no place of snapshots: {_line(error)}") from None
    return store, folder.rstrip("/")


def pull(uri: str, root: str | Path) -> str:
    """Brings the live snapshot of the store into the snapshots folder `root` and makes it live there. Returns its id.

    Does nothing if it is there already. Files that the local live snapshot has are linked, not fetched. Of many
    processes of a host one fetches, and the others wait for it and use what it brought. Every file is checked against
    its hash before CURRENT moves; a pull that fails or is killed leaves the folder as it was. Where the store's CURRENT
    moves back, it moves back here too. Raises SnapshotError, one line, if the store can't be read or what it holds is
    damaged.
    """
    store, folder = open_store(uri)
    storage = LocalStorage(root)
    name = _current(store, folder, uri)
    live = _live(storage)
    if live is not None and live.snapshot_id == name:
        return name
    with storage.lock(PULL_SECONDS, PULL_LOCK):
        name = _current(store, folder, uri)  # it may have moved on while another process fetched
        previous = _live(storage)
        if previous is not None and previous.snapshot_id == name:
            return name
        if not _is_whole(storage, name):
            where = f"{folder}/{name}"
            manifest = Manifest.parse(_read(store, f"{where}/{MANIFEST}", uri), f"{uri}/{name}/{MANIFEST}")
            if manifest.snapshot_id != name:
                raise SnapshotError(f"{uri}/{name}/{MANIFEST} belongs to snapshot {manifest.snapshot_id!r}")
            _bring(store, where, uri, storage, manifest, previous)
        with storage.lock():
            set_current(storage, name)
    return name


def _current(store: fs.FileSystem, folder: str, uri: str) -> str:
    name = _read(store, f"{folder}/{CURRENT}", uri).decode("utf-8", "replace").strip()
    if not is_safe_name(name):
        raise SnapshotError(f"{CURRENT} below {uri} does not hold a snapshot id: {name[:80]!r}")
    return name


def _bring(
    store: fs.FileSystem, where: str, uri: str, storage: LocalStorage, manifest: Manifest, previous: Manifest | None
) -> None:
    staging = f"{STAGING_PREFIX}pull-{os.getpid()}-{time.monotonic_ns()}"
    linkable = {} if previous is None else {file: f"{previous.snapshot_id}/{file.path}" for file in previous.files}

    def bring(file: FileEntry) -> None:
        target = storage.root / staging / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in linkable and storage.share_file(linkable[file], f"{staging}/{file.path}"):
            return
        fs.copy_files(
            f"{where}/{file.path}",
            str(target.absolute()),
            source_filesystem=store,
            destination_filesystem=fs.LocalFileSystem(),
            use_threads=False,
        )

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(bring, manifest.files))
        check_files(storage.root / staging, manifest, range(manifest.shards), hashes=True)
        publish(storage, staging, manifest)
    except OSError as error:
        raise SnapshotError(f"{uri}: snapshot {manifest.snapshot_id} can't be fetched: {_line(error)}") from None
    finally:
        storage.remove_folder(staging)


def _read(store: fs.FileSystem, path: str, uri: str) -> bytes:
    try:
        with store.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise SnapshotError(f"{path} does not exist; push a snapshot to {uri} first") from None
    except OSError as error:
        raise SnapshotError(f"{uri} can't be read: {_line(error)}") from None


def _live(storage: LocalStorage) -> Manifest | None:
    try:
        name = read_current(storage)
        return None if name is None else read_manifest(storage, name)
    except SnapshotError:
        return None


def _is_whole(storage: LocalStorage, name: str) -> bool:
    try:
        manifest = read_manifest(storage, name)
        check_files(storage.root / name, manifest, range(manifest.shards), hashes=False)
    except SnapshotError:
        return False
    return True


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
