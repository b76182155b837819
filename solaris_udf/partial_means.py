"""User means from sums per user and time of computation, so that a mean over 24 hours need not reread 24 hours.

Sums are in float64. Those of float16 vectors that all count the same are exact (a float16 is a multiple of 2^-24 below
2^16, and float64 holds 53 bits), so a vector that was added and taken away again leaves nothing behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from solaris_udf.means import (
    Float64,
    Int64,
    Weighting,
    decode_each,
    ints,
    means_of_totals,
    refused_pairs,
    sum_in_order,
    whole_users,
)

# Output of pair_sums. A row is a sum (reason null) or a refused pair (sums null).
PARTIAL_DDL = (
    "user_id BIGINT, computed_micros BIGINT, pairs_run STRING, sums BINARY, weight DOUBLE, pair_count INT, "
    "pairs_seen BIGINT, reason STRING, row STRING"
)
NAMES = [part.split()[0] for part in PARTIAL_DDL.split(", ")]


def pair_sums(batches: Iterator[pa.RecordBatch], by_probability: bool) -> Iterator[pa.RecordBatch]:
    """Weighted sums of pair embeddings per user and time of computation, as PARTIAL_DDL.

    Input columns: user_id int64, item_id int64, computed_micros int64, embedding binary, codec string, probability
    double (nullable), run_id string, sign int32; sorted by user_id and computed_micros, all rows of a user in this
    stream. sign is 1 for a pair that counts, and -1 for one that no longer does, whose weight and count are negative
    then. A non-finite vector comes out with a reason if it counts; else it never did.
    """
    weighting = Weighting(0, by_probability=by_probability)
    held: _Sums | None = None  # the last user and time, who may go on in the next batch
    for batch in batches:
        if batch.num_rows == 0:
            continue
        vectors = decode_each(batch)
        finite, sign = np.isfinite(vectors).all(axis=1), ints(batch, "sign")
        refused = ~finite & (sign > 0)
        if refused.any():
            yield _refused(refused_pairs(batch.filter(pa.array(refused))))
        if not finite.any():
            continue
        found = _summed(batch.filter(pa.array(finite)), vectors[finite], sign[finite], weighting)
        if held is not None:
            found = found.after(held)
        if len(found.users) > 1:
            yield found.part(slice(0, -1)).rows()
        held = found.part(slice(-1, None))
    if held is not None:
        yield held.rows()


@dataclass(frozen=True)
class _Sums:
    """Sums by user and time [g], sorted."""

    users: Int64
    computed: Int64
    runs: list[str]
    totals: Float64  # [g, d]
    weights: Float64
    pairs: Int64
    seen: Int64

    def part(self, kept: slice) -> "_Sums":
        return _Sums(
            self.users[kept],
            self.computed[kept],
            self.runs[kept],
            self.totals[kept],
            self.weights[kept],
            self.pairs[kept],
            self.seen[kept],
        )

    def after(self, held: "_Sums") -> "_Sums":
        """With one group before it, which is added to the first if it is of the same user and time."""
        if held.totals.shape[1] != self.totals.shape[1]:
            raise ValueError(
                f"vectors of one model version differ in length: {held.totals.shape[1]} and {self.totals.shape[1]}"
            )
        if (held.users[0], held.computed[0]) == (self.users[0], self.computed[0]):
            for mine, theirs in (
                (self.totals, held.totals),
                (self.weights, held.weights),
                (self.pairs, held.pairs),
                (self.seen, held.seen),
            ):
                mine[0] += theirs[0]
            return self
        return _Sums(
            np.concatenate([held.users, self.users]),
            np.concatenate([held.computed, self.computed]),
            [*held.runs, *self.runs],
            np.concatenate([held.totals, self.totals]),
            np.concatenate([held.weights, self.weights]),
            np.concatenate([held.pairs, self.pairs]),
            np.concatenate([held.seen, self.seen]),
        )

    def rows(self) -> pa.RecordBatch:
        """As PARTIAL_DDL."""
        nothing = pa.nulls(len(self.users), pa.string())
        return pa.RecordBatch.from_arrays(
            [
                pa.array(self.users),
                pa.array(self.computed),
                pa.array(self.runs, pa.string()),
                pa.array([row.tobytes() for row in self.totals.astype("<f8")], pa.binary()),
                pa.array(self.weights),
                pa.array(self.pairs.astype(np.int32)),
                pa.array(self.seen),
                nothing,
                nothing,
            ],
            names=NAMES,
        )


def _summed(rows: pa.RecordBatch, vectors: Any, sign: Int64, weighting: Weighting) -> _Sums:
    users, computed = ints(rows, "user_id"), ints(rows, "computed_micros")
    probability = rows.column("probability").cast(pa.float64()).to_numpy(zero_copy_only=False)
    weights = weighting.weights(computed, probability) * sign
    change = np.concatenate([[True], (users[1:] != users[:-1]) | (computed[1:] != computed[:-1])])
    starts, place = np.flatnonzero(change), np.cumsum(change) - 1
    return _Sums(
        users[starts],
        computed[starts],
        rows.column("run_id").take(pa.array(starts)).to_pylist(),
        sum_in_order(vectors.astype(np.float64) * weights[:, None], place, len(starts)),
        np.bincount(place, weights=weights, minlength=len(starts)).astype(np.float64),
        np.add.reduceat(sign, starts),
        np.add.reduceat(np.maximum(sign, 0), starts),
    )


def _refused(rows: pa.RecordBatch) -> pa.RecordBatch:
    """MEANS_DDL rows of refused pairs as PARTIAL_DDL."""
    count = rows.num_rows
    nothing = [pa.nulls(count, kind) for kind in (pa.int64(), pa.string(), pa.binary(), pa.float64(), pa.int32())]
    said = [rows.column(name) for name in ("pairs_seen", "reason", "row")]
    return pa.RecordBatch.from_arrays([rows.column("user_id"), *nothing, *said], names=NAMES)


def means_of_sums(batches: Iterator[pa.RecordBatch], weighting: Weighting) -> Iterator[pa.RecordBatch]:
    """The mean of each user, as MEANS_DDL, from their sums over all times of computation in the window.

    Input columns: user_id, computed_micros, sums, weight, pair_count; sorted by user_id and computed_micros, all rows
    of a user in this stream. A user without a pair that still counts has no row. Of the weighting only the decay
    applies here, as all pairs of one time are equally old.

    Raises ValueError if sums differ in length.
    """
    for rows in whole_users(batches):
        yield _combined(rows, weighting)


def _combined(rows: pa.RecordBatch, weighting: Weighting) -> pa.RecordBatch:
    users, computed = ints(rows, "user_id"), ints(rows, "computed_micros")
    pairs = rows.column("pair_count").to_numpy(zero_copy_only=False).astype(np.int64)
    decay = weighting.weights(computed, np.ones(len(users)))
    widths = pc.unique(pc.binary_length(rows.column("sums"))).to_pylist()
    if len(widths) != 1:
        raise ValueError(f"vectors of one model version differ in length: {sorted(width // 8 for width in widths)}")
    vectors = np.frombuffer(b"".join(rows.column("sums").to_pylist()), "<f8").reshape(len(users), -1)
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    place = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(users))))
    totals = sum_in_order(vectors * decay[:, None], place, len(starts))
    weights = np.bincount(place, weights=rows.column("weight").to_numpy(zero_copy_only=False) * decay)
    counts = np.add.reduceat(pairs, starts)
    # The newest time of which pairs still count: rows of one user and time stand together.
    times = np.flatnonzero(np.concatenate([[True], (users[1:] != users[:-1]) | (computed[1:] != computed[:-1])]))
    counted = np.add.reduceat(pairs, times) > 0
    newest = np.full(len(starts), np.iinfo(np.int64).min)
    np.maximum.at(newest, place[times[counted]], computed[times[counted]])
    kept = counts > 0
    return means_of_totals(users[starts][kept], totals[kept], weights[kept], counts[kept], newest[kept])
