"""What changed from one snapshot to another."""

from dataclasses import dataclass

import numpy as np

from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.mapped import Groups, MappedTable, gather, probe
from solaris_udf.snapshot.reader import Snapshot

_ROWS = 65_536


@dataclass(frozen=True)
class TableDiff:
    """Keys of a table that only the new snapshot has, only the old one, both; of those, with another vector or time."""

    added: int
    removed: int
    common: int
    changed: int
    recomputed: int


@dataclass(frozen=True)
class SnapshotDiff:
    """The pairs and the users of two snapshots compared."""

    old: str
    new: str
    pairs: TableDiff
    users: TableDiff


def diff(old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Compares two snapshots, all of whose shards are held.

    changed counts vectors whose bytes differ (all of them if the codec or the dimensions do), recomputed those of
    another computed_at. Memory does not grow with the snapshots.
    """
    return SnapshotDiff(
        old.snapshot_id,
        new.snapshot_id,
        _table(old.pairs, new.pairs, new.manifest.shards, True),
        _table(old.users, new.users, new.manifest.shards, False),
    )


def _table(old: dict[int, MappedTable], new: dict[int, MappedTable], shards: int, is_pairs: bool) -> TableDiff:
    common = changed = recomputed = 0
    for table in old.values():
        for start in range(0, table.rows, _ROWS):
            rows = slice(start, start + _ROWS)
            users = np.ascontiguousarray(table.columns["user_id"][rows])
            hashes = hash_users(users)
            groups = Groups.by_shard(shard_of(hashes, shards), shards)
            keys = {"user_id": groups.arrange(users)}
            if is_pairs:
                items = np.ascontiguousarray(table.columns["item_id"][rows])
                hashes = hash_pairs(hashes, items)
                keys["item_id"] = groups.arrange(items)
            found = probe(new, groups, groups.arrange(hashes), keys)
            both = found >= 0
            common += int(both.sum())
            times = gather(new, groups, found, "computed_at", np.zeros(groups.count, np.int64))
            recomputed += int((both & (times != groups.arrange(table.columns["computed_at"][rows]))).sum())
            vectors = groups.arrange(table.columns["embedding"][rows])
            width = next(iter(new.values())).columns["embedding"].shape[1]
            if vectors.shape[1] != width:
                changed += int(both.sum())
            else:
                theirs = gather(new, groups, found, "embedding", np.zeros((groups.count, width), np.uint8))
                changed += int((both & (theirs != vectors).any(axis=1)).sum())
    total_old, total_new = (sum(table.rows for table in tables.values()) for tables in (old, new))
    return TableDiff(total_new - common, total_old - common, common, changed, recomputed)
