"""What changed from one snapshot to another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.layout import PAIRS, USERS
from solaris_udf.snapshot.mapped import MappedTable
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
        _diff(old.pairs, new, PAIRS),
        _diff(old.users, new, USERS),
    )


def _diff(old: Mapping[int, MappedTable], snapshot: Snapshot, kind: str) -> TableDiff:
    common = changed = recomputed = 0
    tables = snapshot.tables
    new = tables.pairs if kind == PAIRS else tables.users
    for table in old.values():
        for start in range(0, table.rows, _ROWS):
            rows = slice(start, start + _ROWS)
            ids = [np.ascontiguousarray(table.columns["user_id"][rows])]
            hashes = hash_users(ids[0])
            shard = shard_of(hashes, snapshot.manifest.shards)
            if kind == PAIRS:
                ids.append(np.ascontiguousarray(table.columns["item_id"][rows]))
                hashes = hash_pairs(hashes, ids[1])
            keys, found = new.probe(shard, hashes, *ids)
            common += len(keys)
            shard = shard.take(keys)
            times = new.column("computed_at", shard, found)
            recomputed += int((times != table.columns["computed_at"][rows][keys]).sum())
            vectors = table.columns["embedding"][rows][keys]
            if vectors.shape[1] != snapshot.manifest.width:
                changed += len(keys)
            else:
                theirs = tables.vectors[new.vectors(shard, found, vectors.shape[1])].view(np.uint8)
                changed += int((theirs.reshape(vectors.shape) != vectors).any(axis=1).sum())
    total_old, total_new = sum(table.rows for table in old.values()), int(new.rows.sum())
    return TableDiff(total_new - common, total_old - common, common, changed, recomputed)
