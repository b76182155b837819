"""A snapshot copied to Redis, for fleets that want a network store. Needs the `redis` package; the reader does not.

Every key begins with `<prefix>:<snapshot id>:`, so versions stand side by side, and `<prefix>:current` names the live
one: it is set once everything is there, in one command, so that no client sees half a version. Keys of a version:

    <prefix>:<id>:p:<user_id>:<item_id>   computed_at (int64 microseconds, little-endian), then the stored vector
    <prefix>:<id>:u:<user_id>             computed_at, tier (uint8), similarity (float32), then the stored vector
    <prefix>:<id>:manifest                manifest.json

Everything but `current` expires, so that an old or abandoned version goes by itself. A client reads `current`, then
MGETs pair keys, then the user keys of those that missed. The neighbours' pairs are not resolved there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.mapped import MappedTable
from solaris_udf.snapshot.reader import Snapshot

if TYPE_CHECKING:
    import redis

_ROWS = 2_000  # rows of one pipeline: a few hundred kilobytes on the wire


def export(
    snapshot: Snapshot,
    client: "redis.Redis[bytes]",
    *,
    prefix: str = "solaris",
    keep_seconds: int = 86_400,
    replaces: str | None = None,
) -> int:
    """Copies a snapshot, all of whose shards are held, and makes it current unless a later one is.

    Returns the number of pairs and users copied.

    keep_seconds: when the keys of this version expire. Copying the same version again only renews that. replaces: a
    rollback: what `current_in` said; `current` moves to an earlier slice too, and not at all if it names another by
    then. Raises SnapshotError if Redis can't be reached or refuses, with `current` left alone.
    """
    import redis

    base = f"{prefix}:{snapshot.snapshot_id}"
    count = 0
    try:
        for commands in _chunks(snapshot, base):
            pipeline = client.pipeline(transaction=False)
            for key, value in commands:
                pipeline.set(key, value, ex=keep_seconds)
            pipeline.execute()
            count += len(commands)
        client.set(f"{base}:manifest", snapshot.manifest.to_json(), ex=keep_seconds)
        _flip(client, f"{prefix}:current", snapshot, replaces)
    except redis.RedisError as error:
        raise SnapshotError(
            f"Redis refused the copy of {snapshot.snapshot_id}: {error}; {prefix}:current was left alone"
        ) from None
    return count


def current_in(client: "redis.Redis[bytes]", prefix: str = "solaris") -> str:
    """The id that `<prefix>:current` names; an empty text without one. Raises SnapshotError if Redis can't be read."""
    import redis

    try:
        return _text(client.get(f"{prefix}:current"))
    except redis.RedisError as error:
        raise SnapshotError(f"Redis refused to say what {prefix}:current is: {error}") from None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _flip(client: "redis.Redis[bytes]", key: str, snapshot: Snapshot, replaces: str | None) -> None:
    """Sets current in one transaction; of two copies at once the one of the later slice stays."""

    def move(pipeline: "redis.client.Pipeline[bytes]") -> None:
        name = _text(pipeline.get(key))
        if replaces is not None and name != replaces:
            raise SnapshotError(f"another publisher moved {key} to {name[:80]!r} meanwhile; see to it, then try again")
        pipeline.multi()
        if replaces is not None or name.split("-")[0] <= snapshot.manifest.slice:
            pipeline.set(key, snapshot.snapshot_id)

    client.transaction(move, key)  # type: ignore[no-untyped-call]


def _chunks(snapshot: Snapshot, base: str) -> Iterator[list[tuple[str, bytes]]]:
    for table in snapshot.pairs.values():
        for rows in _slices(table):
            users, items = (table.columns[name][rows].tolist() for name in ("user_id", "item_id"))
            values = _packed(table, rows, ())
            keys = (f"{base}:p:{user}:{item}" for user, item in zip(users, items, strict=True))
            yield list(zip(keys, values, strict=True))
    for table in snapshot.users.values():
        for rows in _slices(table):
            values = _packed(table, rows, ("tier", "similarity"))
            keys = (f"{base}:u:{user}" for user in table.columns["user_id"][rows].tolist())
            yield list(zip(keys, values, strict=True))


def _slices(table: MappedTable) -> Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, table.rows, _ROWS))


def _packed(table: MappedTable, rows: slice, names: tuple[str, ...]) -> list[bytes]:
    """One value a row: computed_at, the named columns, the stored vector, without gaps."""
    parts = [np.ascontiguousarray(table.columns[name][rows]) for name in ("computed_at", *names)]
    parts = [part.view(np.uint8).reshape(len(part), part.itemsize) for part in parts]
    raw = np.concatenate([*parts, table.columns["embedding"][rows]], axis=1)
    return [row.tobytes() for row in raw]
