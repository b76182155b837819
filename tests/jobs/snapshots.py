"""Small snapshots by hand, written with the library that exports write with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from jobs.common.clock import micros, slice_of
from solaris_udf.codec import encode
from solaris_udf.snapshot.hashing import hash_pairs, hash_users
from solaris_udf.snapshot.layout import MANIFEST
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.shards import ShardSummary, write_shards
from solaris_udf.tiers import NEIGHBOR_MEAN, USER_MEAN, TierPolicy

DIM = 4
ORDER = ("pair", "user_mean", "neighbor_pair", "neighbor_mean")


def vector(*values: float) -> list[float]:
    """[x, y] -> [x, y, 0, 0]"""
    return [*values, *[0.0] * (DIM - len(values))]


@dataclass(frozen=True)
class Pair:
    user: int
    item: int
    at: datetime
    vector: list[float]


@dataclass(frozen=True)
class User:
    """A user's mean; of a source user with a similarity if that is another."""

    user: int
    at: datetime
    vector: list[float]
    source: int | None = None
    similarity: float = 1.0
    neighbors: list[tuple[int, float]] = field(default_factory=list)


def write_snapshot(
    root: Path,
    as_of: datetime,
    pairs: Sequence[Pair],
    users: Sequence[User],
    *,
    version: str = "m1",
    order: Sequence[str] = ORDER,
    ttl_hours: float = 24,
    max_user_age_hours: float = 48,
) -> str:
    """Writes a one-shard snapshot below root/snapshots and returns its id. CURRENT is not touched."""
    staging = root / "snapshots" / f".made-{slice_of(as_of)}-{version}"
    rows = []
    for pair in pairs:
        key = hash_pairs(hash_users(np.array([pair.user])), np.array([pair.item]))[0]
        rows.append((0, key, pair.user, pair.item, pair.vector, pair.at, 0, 0, 1.0, []))
    for user in users:
        tier = USER_MEAN if user.source is None else NEIGHBOR_MEAN
        rows.append(
            (
                1,
                hash_users(np.array([user.user]))[0],
                user.user,
                0,
                user.vector,
                user.at,
                tier,
                user.user if user.source is None else user.source,
                user.similarity,
                user.neighbors,
            )
        )
    rows.sort(key=lambda row: row[:4])
    kinds = pa.list_(pa.struct([("user_id", pa.int64()), ("similarity", pa.float32())]))
    batch = pa.RecordBatch.from_pydict(
        {
            "shard": pa.array([0] * len(rows), pa.int32()),
            "kind": pa.array([row[0] for row in rows], pa.int8()),
            "user_id": [row[2] for row in rows],
            "item_id": pa.array([row[3] for row in rows], pa.int64()),
            "embedding": encode(np.array([row[4] for row in rows])),
            "codec": ["float16"] * len(rows),
            "computed_at": [micros(row[5]) for row in rows],
            "tier": pa.array([row[6] for row in rows], pa.uint8()),
            "source_user": pa.array([row[7] for row in rows], pa.int64()),
            "similarity": pa.array([row[8] for row in rows], pa.float32()),
            "neighbors": pa.array(
                [[{"user_id": who, "similarity": near} for who, near in row[9]] for row in rows], kinds
            ),
        }
    )
    parts = list(write_shards(iter([batch]), folder=str(staging), shards=1, codec="float16", dim=DIM, neighbors=2))
    summary = ShardSummary.parse(parts[0].column("summary")[0].as_py())
    manifest = Manifest(
        slice=slice_of(as_of),
        as_of_micros=micros(as_of),
        model_version=version,
        dim=DIM,
        codec="float16",
        shards=1,
        neighbors=2,
        policy=TierPolicy.of_hours(order, ttl_hours, max_user_age_hours, 0.0),
        pairs=summary.pairs,
        users_own=summary.users_own,
        users_neighbor=summary.users_neighbor,
        mean_norm=1.0,
        files=tuple(summary.files),
    )
    (staging / MANIFEST).write_text(manifest.to_json())
    staging.rename(root / "snapshots" / manifest.snapshot_id)
    return manifest.snapshot_id


def snapshot_row(snapshot_id: str, live_from: datetime, version: str = "m1") -> dict[str, object]:
    """Its row of the table snapshots."""
    return {
        "snapshot_id": snapshot_id,
        "live_from": live_from,
        "model_version": version,
        "status": "retired",
        "pairs": 1,
        "users_own": 1,
        "users_neighbor": 0,
        "bytes": 1,
        "manifest_sha256": "x",
    }
