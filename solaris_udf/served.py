"""What the snapshot live at each row's time would have served, on executors: Arrow batches in, Arrow batches out."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.codec import encode
from solaris_udf.snapshot import Snapshot
from solaris_udf.tiers import TIER_NAMES

# Open snapshots of this worker. Rows come ordered by snapshot, so a few open ones are enough and none is opened twice.
_OPEN: OrderedDict[str, Snapshot] = OrderedDict()
_MOST_OPEN = 4

_NO_AGE = -1


def snapshot_at(path: str) -> Snapshot:
    """The snapshot in that folder, opened once a worker."""
    if path not in _OPEN:
        _OPEN[path] = Snapshot.open(path, engine="numpy")  # a task is too short to compile for
        while len(_OPEN) > _MOST_OPEN:
            _OPEN.popitem(last=False)
    _OPEN.move_to_end(path)
    return _OPEN[path]


def serve(batches: Iterator[pa.RecordBatch], paths: Sequence[str], vectors: bool) -> Iterator[pa.RecordBatch]:
    """Adds what was served to batches with user_id, item_id, event_time and period (index into paths, -1 for none).

    Added with vectors: tier, age_seconds, similarity, embedding (float16, null for none), then the same for the
    user-level vector with the prefix user_. Without: tier and age_seconds.
    """
    for batch in batches:
        yield _serve(batch, paths, vectors)


def _serve(batch: pa.RecordBatch, paths: Sequence[str], vectors: bool) -> pa.RecordBatch:
    count = batch.num_rows
    period = batch.column("period").to_numpy()
    tier = np.zeros(count, np.uint8)
    age = np.full(count, _NO_AGE, np.int32)
    user_tier, user_age = tier.copy(), age.copy()
    near, user_near = np.zeros(count, np.float32), np.zeros(count, np.float32)
    parts: list[tuple[npt.NDArray[np.int64], Any]] = []
    at = batch.column("event_time").cast(pa.int64()).to_numpy()
    users, items = batch.column("user_id").to_numpy(), batch.column("item_id").to_numpy()
    for index in np.unique(period[period >= 0]):
        place = np.flatnonzero(period == index)
        found = snapshot_at(paths[index]).lookup(users[place], items[place], at[place])
        tier[place], age[place] = found.tier, found.age_seconds
        if vectors:
            near[place], user_near[place] = found.similarity, found.user_similarity
            user_tier[place], user_age[place] = found.user_tier, found.user_age_seconds
            parts.append((place, found))
    columns = list(batch.columns)
    names = list(batch.schema.names)
    columns += [_names(tier), pa.array(age)]
    names += ["tier", "age_seconds"]
    if vectors:
        columns += [
            pa.array(near),
            _packed(count, [(place, found.embedding, found.tier) for place, found in parts]),
            _names(user_tier),
            pa.array(user_age),
            pa.array(user_near),
            _packed(count, [(place, found.user_embedding, found.user_tier) for place, found in parts]),
        ]
        names += ["similarity", "embedding", "user_tier", "user_age_seconds", "user_similarity", "user_embedding"]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _names(codes: npt.NDArray[np.uint8]) -> pa.Array:
    return pa.array(TIER_NAMES, pa.string()).take(pa.array(codes))


def _packed(count: int, parts: Sequence[tuple[npt.NDArray[np.int64], Any, Any]]) -> pa.Array:
    """Vectors of the rows that have one as float16, null for the rest."""
    pieces = [(place[tier > 0], vector[tier > 0]) for place, vector, tier in parts]
    pieces = [(place, vector) for place, vector in pieces if len(place)]
    if not pieces:
        return pa.nulls(count, pa.binary())
    index = np.full(count, -1, np.int64)
    index[np.concatenate([place for place, _ in pieces])] = np.arange(sum(len(place) for place, _ in pieces))
    stored = pa.concat_arrays([encode(vector) for _, vector in pieces])
    return stored.take(pa.array(index, mask=index < 0))
