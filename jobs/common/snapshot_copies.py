"""Snapshots in other places: copied to an object store or Redis, brought from a store, rolled back there.

`root` is the snapshots folder, as in jobs.common.snapshots; faults come as UserError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jobs.common.errors import UserError
from jobs.common.snapshot_push import Pushed, current_in, push
from jobs.common.snapshots import existing, folder_at, kept, note_rollback, one_error, snapshot_before
from solaris_udf.snapshot.layout import is_safe_name
from solaris_udf.snapshot.pull import pull
from solaris_udf.snapshot.reader import Snapshot

if TYPE_CHECKING:
    import redis

REDIS = ("redis", "rediss", "unix")


@one_error
def to_object_store(root: str | Path, snapshot_id: str | None, uri: str) -> Pushed:
    """Copies a snapshot (default: the live one) to s3://BUCKET/PREFIX and makes it current there."""
    return push(root, snapshot_id, uri)


@one_error
def from_object_store(root: str | Path, uri: str) -> str:
    """Brings an object store's live snapshot into the folder and makes it live. Returns its id."""
    return pull(uri, root)


@one_error
def to_redis(
    root: str | Path, snapshot_id: str | None, url: str, prefix: str = "solaris", keep_hours: float = 24.0
) -> tuple[int, str]:
    """Copies a snapshot (default: the live one) to Redis and makes it current there. Returns the keys and its id."""
    from solaris_udf.snapshot.redis_export import export

    with _redis(url) as client:
        snapshot = Snapshot.open(root, pin=snapshot_id, verify="full", engine="numpy")
        return export(snapshot, client, prefix=prefix, keep_seconds=round(keep_hours * 3600)), snapshot.snapshot_id


@one_error
def roll_back_in(
    uri: str, root: str | Path, snapshot_id: str | None = None, prefix: str = "solaris", keep_hours: float = 24.0
) -> str:
    """Makes a snapshot of the folder current in s3://BUCKET/PREFIX or redis://HOST:PORT/DB, whatever is current there;
    by default the one before that. Returns its id. The folder's own CURRENT stays.

    The snapshot is verified in full and copied first, which sends what the place lacks, and in Redis puts off when its
    keys expire. `current` then moves in one step, unless another publisher moved it meanwhile: that is an error. The
    move is noted in the folder's ROLLBACKS, like a local one, but afterwards, since the copy may take long: if it is
    killed, name the snapshot in the next call. It is pinned in the folder, which nothing else there knows to be in use.
    prefix, keep_hours: of Redis.
    """
    storage, scheme = folder_at(root), urlsplit(uri).scheme
    if scheme in REDIS:
        from solaris_udf.snapshot import redis_export

        with _redis(uri) as client:
            live = redis_export.current_in(client, prefix)
            target = _target(root, snapshot_id, live, f"{prefix}:current")
            with kept(root, target):
                snapshot = Snapshot.open(root, pin=target, verify="full", engine="numpy")
                keep_seconds = round(keep_hours * 3600)
                redis_export.export(snapshot, client, prefix=prefix, keep_seconds=keep_seconds, replaces=live)
    elif scheme == "s3":
        live = current_in(uri)
        target = _target(root, snapshot_id, live, f"CURRENT of {uri}")
        with kept(root, target):
            push(root, target, uri, replaces=live)
    else:
        raise UserError(
            f"a place to roll back in is s3://BUCKET/PREFIX or redis://HOST:PORT/DB, not {scheme or 'a path'}"
        )
    with storage.lock(wait_seconds=600):  # it has moved already: joins and audits must know
        note_rollback(storage, target)
    return target


def _target(root: str | Path, snapshot_id: str | None, live: str, where: str) -> str:
    storage = folder_at(root)
    if snapshot_id is not None:
        existing(storage, snapshot_id)
        return snapshot_id
    if not is_safe_name(live):
        raise UserError(f"{where} names no snapshot ({live[:80]!r}); say which one to make current")
    return snapshot_before(storage, live)


@contextmanager
def _redis(url: str) -> "Iterator[redis.Redis[bytes]]":
    try:
        import redis
    except ImportError:
        raise UserError("copying to Redis needs the redis package: pip install 'solaris-pipeline[redis]'") from None
    try:
        client = redis.Redis.from_url(url)
    except ValueError as error:  # the address itself may hold a password
        raise UserError(f"this is no Redis address: {error}; one is redis://127.0.0.1:6379/0") from None
    with client:
        yield client
