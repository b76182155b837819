"""User means from a stream of pair embeddings that is sorted by user: one pass, one user in memory at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from solaris_udf.codec import decode, encode

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Output of user_means, as Spark DDL. A row is a user's mean (reason null) or a refused pair or mean (embedding null).
MEANS_DDL = (
    "user_id BIGINT, embedding BINARY, pair_count INT, newest_micros BIGINT, pairs_seen BIGINT, reason STRING, "
    "row STRING"
)
MEANS_SCHEMA = pa.schema(
    [
        ("user_id", pa.int64()),
        ("embedding", pa.binary()),
        ("pair_count", pa.int32()),
        ("newest_micros", pa.int64()),
        ("pairs_seen", pa.int64()),
        ("reason", pa.string()),
        ("row", pa.string()),
    ]
)
MICROS_PER_HOUR = 3_600_000_000
CHUNK_VALUES = 1 << 21  # summed at once: 16 MB of float64
MAX_HALVINGS = 500.0  # keeps every weight a normal float64
MIN_PROBABILITY = 1e-6  # so that a user whose probabilities are all 0 still has a mean


@dataclass(frozen=True)
class Weighting:
    """How much a pair counts in its user's mean: all the same unless said otherwise."""

    as_of_micros: int
    half_life_hours: float = 0.0  # 0: no decay
    by_probability: bool = False

    def weights(self, computed_micros: Int64, probability: Float64) -> Float64:
        """Weights [n] > 0 of pairs computed at those times; a NaN probability counts as 1."""
        weights = np.ones(len(computed_micros), dtype=np.float64)
        if self.half_life_hours > 0:
            age_hours = (self.as_of_micros - computed_micros) / MICROS_PER_HOUR
            weights *= np.exp2(-np.minimum(age_hours / self.half_life_hours, MAX_HALVINGS))
        if self.by_probability:
            weights *= np.maximum(np.where(np.isnan(probability), 1.0, probability), MIN_PROBABILITY)
        return weights


@dataclass(frozen=True)
class _Partial:
    """The sums so far of the user whose rows may go on in the next chunk."""

    user: int
    vector: Float64  # [d], weighted sum
    weight: float
    pairs: int
    newest: int


def user_means(batches: Iterator[pa.RecordBatch], weighting: Weighting) -> Iterator[pa.RecordBatch]:
    """The mean of the latest embedding per pair, for each user of a sorted stream.

    Input columns: user_id int64, item_id int64, computed_micros int64, embedding binary, codec string, probability
    double (nullable); sorted by user_id, item_id, then latest first, all rows of a user in this stream. The first row
    of a pair counts, the others are older versions of it. Sums are in float64 and in row order, whatever the batches,
    so the result does not depend on how Spark cut the data; the mean is stored as float16.

    A non-finite vector, and a mean that float16 can't hold, come out as a row with a reason.

    Raises ValueError if the vectors of a user differ in length.
    """
    partial: _Partial | None = None
    last_pair: tuple[int, int] | None = None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        users, items = ints(batch, "user_id"), ints(batch, "item_id")
        first = np.ones(len(users), dtype=bool)
        first[1:] = (users[1:] != users[:-1]) | (items[1:] != items[:-1])
        first[0] = (int(users[0]), int(items[0])) != last_pair
        last_pair = (int(users[-1]), int(items[-1]))
        kept = batch.filter(pa.array(first))
        width = max(1, max((len(value) for value in kept.column("embedding")[:1].to_pylist()), default=1) // 2)
        step = max(1, CHUNK_VALUES // width)
        for start in range(0, kept.num_rows, step):
            done, partial = _add(kept.slice(start, step), partial, weighting)
            yield from done
    if partial is not None:
        yield means_of_totals(
            [partial.user], partial.vector[None, :], [partial.weight], [partial.pairs], [partial.newest]
        )


def _add(
    rows: pa.RecordBatch, partial: _Partial | None, weighting: Weighting
) -> tuple[list[pa.RecordBatch], _Partial | None]:
    """Adds the latest rows of pairs to the sums; returns finished users, refused rows, and the user still open."""
    vectors = decode_each(rows)
    finite = np.isfinite(vectors).all(axis=1)
    out = [] if finite.all() else [refused_pairs(rows.filter(pa.array(~finite)))]
    users, newest = ints(rows, "user_id")[finite], ints(rows, "computed_micros")[finite]
    probability = rows.column("probability").cast(pa.float64()).to_numpy(zero_copy_only=False)[finite]
    weights = weighting.weights(newest, probability)
    sums = vectors[finite].astype(np.float64) * weights[:, None]
    pairs = np.ones(len(users), dtype=np.int64)
    if len(users) == 0:
        return out, partial
    if partial is not None:  # the open user goes first, so that their sum goes on in row order
        if len(partial.vector) != sums.shape[1]:
            raise ValueError(f"vectors of one version differ in length: {len(partial.vector)} and {sums.shape[1]}")
        users = np.concatenate([[partial.user], users])
        sums = np.concatenate([partial.vector[None, :], sums])
        weights = np.concatenate([[partial.weight], weights])
        pairs = np.concatenate([[partial.pairs], pairs])
        newest = np.concatenate([[partial.newest], newest])
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    place = np.cumsum(np.concatenate([[0], users[1:] != users[:-1]]))
    totals = sum_in_order(sums, place, len(starts))
    weight_totals = np.bincount(place, weights=weights, minlength=len(starts))
    pair_totals = np.add.reduceat(pairs, starts)
    newest_totals = np.maximum.reduceat(newest, starts)
    owners = users[starts]
    if len(starts) > 1:
        out.append(means_of_totals(owners[:-1], totals[:-1], weight_totals[:-1], pair_totals[:-1], newest_totals[:-1]))
    still_open = _Partial(
        int(owners[-1]), totals[-1], float(weight_totals[-1]), int(pair_totals[-1]), int(newest_totals[-1])
    )
    return out, still_open


def sum_in_order(rows: Float64, place: Int64, count: int) -> Float64:
    """Sums rows [n, d] into [count, d], strictly one after the other: np.add.reduceat adds pairwise, so its rounding
    would depend on where a batch ends."""
    dim = rows.shape[1]
    flat = (place[:, None] * dim + np.arange(dim)).ravel()
    totals: Float64 = np.bincount(flat, weights=rows.ravel(), minlength=count * dim).astype(np.float64, copy=False)
    return totals.reshape(count, dim)


def means_of_totals(users: Any, sums: Float64, weights: Any, pairs: Any, newest: Any) -> pa.RecordBatch:
    means = (sums / np.asarray(weights, dtype=np.float64)[:, None]).astype(np.float32)
    pair_counts = np.asarray(pairs, dtype=np.int64)
    with np.errstate(over="ignore"):
        held = np.isfinite(means.astype(np.float16)).all(axis=1)
    means[~held] = 0
    missing = pa.array(~held)
    ids = pa.array(np.asarray(users, dtype=np.int64))
    described = pc.binary_join_element_wise('{"user_id": ', ids.cast(pa.string()), "}", "")
    nothing = pa.nulls(len(ids), pa.string())
    return pa.RecordBatch.from_arrays(
        [
            ids,
            pc.if_else(missing, pa.nulls(len(ids), pa.binary()), encode(means, "float16")),
            pa.array(pair_counts.astype(np.int32)),
            pa.array(np.asarray(newest, dtype=np.int64)),
            pa.array(pair_counts),
            pc.if_else(missing, "the mean does not fit float16", nothing),
            pc.if_else(missing, described, nothing),
        ],
        schema=MEANS_SCHEMA,
    )


def refused_pairs(rows: pa.RecordBatch) -> pa.RecordBatch:
    count = rows.num_rows
    user, item, computed = (rows.column(name).cast(pa.string()) for name in ("user_id", "item_id", "computed_micros"))
    described = pc.binary_join_element_wise(
        '{"user_id": ', user, ', "item_id": ', item, ', "computed_micros": ', computed, "}", ""
    )
    return pa.RecordBatch.from_arrays(
        [
            rows.column("user_id"),
            pa.nulls(count, pa.binary()),
            pa.nulls(count, pa.int32()),
            pa.nulls(count, pa.int64()),
            pa.array(np.ones(count, dtype=np.int64)),
            pa.array(["the stored embedding has a NaN or an Inf"] * count),
            described,
        ],
        schema=MEANS_SCHEMA,
    )


def decode_each(rows: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """Decodes vectors [n, d] whose codecs may differ from row to row."""
    codecs = rows.column("codec")
    names = pc.unique(codecs).to_pylist()
    if len(names) == 1:
        return decode(rows.column("embedding"), names[0])
    found: dict[str, tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]] = {}
    for name in names:
        mask = pc.equal(codecs, name)
        found[name] = (np.asarray(mask), decode(rows.column("embedding").filter(mask), name))
    dims = {vectors.shape[1] for _, vectors in found.values()}
    if len(dims) != 1:
        raise ValueError(f"vectors of one model version differ in length: {sorted(dims)}")
    out = np.zeros((rows.num_rows, dims.pop()), dtype=np.float32)
    for place, vectors in found.values():
        out[place] = vectors
    return out


def whole_users(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, sorted by user_id, in batches that hold all rows of each of their users."""
    held: pa.RecordBatch | None = None  # the last user's rows, who may go on in the next batch
    for batch in batches:
        rows = batch if held is None else pa.concat_batches([held, batch])
        if rows.num_rows == 0:
            continue
        users = ints(rows, "user_id")
        last = int(np.searchsorted(users, users[-1]))
        held = rows.slice(last)
        if last:
            yield rows.slice(0, last)
    if held is not None:
        yield held


def ints(batch: pa.RecordBatch, name: str) -> Int64:
    """A column of integers without nulls, as int64."""
    values: Int64 = batch.column(name).cast(pa.int64()).to_numpy(zero_copy_only=True)
    return values
