"""Exact cosine neighbours of a block of vectors: right to the tie, and the same whatever the block, batch or threads.

faiss finds candidates in float32; they are ranked again in exact arithmetic, and a row whose candidates are not
provably complete is searched in full. Exact arithmetic works because unit vectors are put on a grid of 2^-26: a dot
product of two such vectors is a multiple of 2^-52 of absolute value at most about 1, which float64 adds without
rounding, in any order.

Importing faiss and torch in either order in one process is safe with the pinned Linux wheels (tested); faiss is
imported only when a search starts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

GRID = float(2**26)
BLOCK_VALUES = 1 << 22  # float64 values of one temporary: 32 MB
RANKED_VALUES = 1 << 17  # float64 values ranked at once: 1 MB, which stays in a core's cache
MARGIN = 4  # candidates beyond k; more make a full search rarer and the ranking dearer


@dataclass(frozen=True)
class Hits:
    """The nearest of each query, most similar first, ties by id; places beyond `counts` are padding."""

    ids: Int64  # [q, k]
    similarity: Float32  # [q, k], -inf where padded
    counts: Int64  # [q]


def use_threads(count: int) -> None:
    """Lets faiss use that many threads in this process: a Spark task calls it with its task cpus."""
    import faiss

    faiss.omp_set_num_threads(max(1, count))


def task_threads() -> int:
    """The cpus of the Spark task that this runs in; 1 outside a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return int(context.cpus()) if context is not None else 1


def unit_vectors(vectors: npt.ArrayLike) -> tuple[Float32, Bool, Bool]:
    """Scales vectors [n, d] to length 1, on the grid. Returns (units [n, d], finite [n], zero [n]).

    Rows that are not finite, or zero, come out as zeros. Grid values below 1 have at most 26 bits after the point and
    24 significant bits, so float32 holds them exactly.
    """
    given = np.asarray(vectors)
    units = np.empty(given.shape, dtype=np.float32)
    finite, zero = np.empty(len(given), dtype=np.bool_), np.empty(len(given), dtype=np.bool_)
    step = max(1, RANKED_VALUES // max(1, given.shape[1]))
    for start in range(0, len(given), step):
        part = slice(start, start + step)
        values = given[part].astype(np.float64)
        finite[part] = np.isfinite(values).all(axis=1)
        values[~finite[part]] = 0.0
        largest = np.abs(values).max(axis=1, initial=0.0)
        zero[part] = finite[part] & (largest == 0)
        # First by the largest value, so that squares neither overflow nor vanish.
        values /= np.where(largest > 0, largest, 1.0)[:, None]
        length = np.sqrt(np.einsum("nd,nd->n", values, values))
        values /= np.where(length > 0, length, 1.0)[:, None]
        values *= GRID
        units[part] = np.rint(values, out=values) / GRID
    return units, finite, zero


def top_k(queries: Float32, base: Float32, base_ids: Int64, k: int, query_ids: Int64 | None = None) -> Hits:
    """The k most similar base vectors [n, d] of each query [q, d]; both from unit_vectors, no zero rows.

    With query_ids [q], a base vector of the query's own id is left out. Similarity is the cosine rounded to float32;
    equal ones are ranked by id. Fewer than k others: counts says how many there are.
    """
    import faiss

    total, wanted = len(base), k + (query_ids is not None)
    if len(queries) == 0 or total == 0 or k == 0:
        return no_hits(len(queries), k)
    fetched = min(total, wanted + MARGIN)
    approximate, found = faiss.knn(
        np.ascontiguousarray(queries, dtype=np.float32),
        np.ascontiguousarray(base, dtype=np.float32),
        fetched,
        metric=faiss.METRIC_INNER_PRODUCT,
    )
    left_out = approximate.min(axis=1) if fetched < total else np.full(len(queries), -np.inf, np.float32)
    ids, similarity, unsure = settle(queries, base, base_ids, k, query_ids, found, left_out)
    if len(unsure):
        own = None if query_ids is None else query_ids[unsure]
        ids[unsure], similarity[unsure] = search_all(queries[unsure], base, base_ids, k, own)
    return Hits(ids, similarity, np.isfinite(similarity).sum(axis=1))


def no_hits(queries: int, k: int) -> Hits:
    """Hits of queries that have nothing to find."""
    ids, similarity = np.zeros((queries, k), np.int64), np.full((queries, k), -np.inf, np.float32)
    return Hits(ids, similarity, np.zeros(queries, np.int64))


def settle(
    queries: Float32, base: Float32, base_ids: Int64, k: int, query_ids: Int64 | None, found: Int64, left_out: Float32
) -> tuple[Int64, Float32, Int64]:
    """Ranks candidates exactly: (ids [q, k], similarity [q, k], rows whose candidates may be incomplete [u]).

    found [q, m]: rows of base, -1 for none. left_out [q]: no other base vector is more similar than this in faiss's own
    rounding; -inf where there is no other.
    """
    similarity = _exact_similarity(queries, base, np.maximum(found, 0))
    ids = base_ids[np.maximum(found, 0)]
    unwanted = found < 0
    if query_ids is not None:
        unwanted |= ids == query_ids[:, None]
    similarity[unwanted] = -np.inf
    ids, similarity = rank(ids, similarity, k)
    # A float32 sum of d products of unit vectors is off by less than (d + 2) * 2^-24, in whatever order it is added.
    slack = np.float32(2 * (queries.shape[1] + 2) * 2.0**-24)
    unsure = np.flatnonzero((left_out + slack >= similarity[:, k - 1]) & np.isfinite(left_out))
    return ids, similarity, unsure


def rank(ids: Int64, similarity: Float32, k: int) -> tuple[Int64, Float32]:
    """The k best places of each row [q, m], most similar first, ties by id; padded with -inf to k."""
    order = np.lexsort((ids, -similarity), axis=-1)[:, :k]
    ids, similarity = np.take_along_axis(ids, order, 1), np.take_along_axis(similarity, order, 1)
    missing = k - ids.shape[1]
    if missing > 0:
        ids = np.pad(ids, ((0, 0), (0, missing)))
        similarity = np.pad(similarity, ((0, 0), (0, missing)), constant_values=-np.inf)
    return ids, similarity


def similarities(queries: Float32, base: Float32) -> Float32:
    """Cosines [q, n] of all queries with all base vectors, exact and then rounded to float32."""
    return _cosine(queries.astype(np.float64) @ base.astype(np.float64).T)


def _cosine(product: Float64) -> Float32:
    """Dot products of vectors that the grid made a hair longer or shorter than 1, as float32 cosines in [-1, 1]."""
    # Adding 0 turns -0.0 into 0.0, so that equal similarities are equal bits.
    return np.clip(product.astype(np.float32), np.float32(-1), np.float32(1)) + np.float32(0)


def _exact_similarity(queries: Float32, base: Float32, found: Int64) -> Float32:
    out = np.empty(found.shape, dtype=np.float32)
    step = max(1, RANKED_VALUES // (found.shape[1] * queries.shape[1] or 1))
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        product = np.einsum("qmd,qd->qm", base[found[part]].astype(np.float64), queries[part].astype(np.float64))
        out[part] = _cosine(product)
    return out


def search_all(
    queries: Float32, base: Float32, base_ids: Int64, k: int, query_ids: Int64 | None
) -> tuple[Int64, Float32]:
    """ids and similarity [q, k] by full search, for queries with so many near ties that candidates can't be trusted."""
    kept = _without_useless_copies(base, base_ids, k + 1)
    base, base_ids = base[kept], base_ids[kept]
    total = len(base)
    keep = min(k, total)
    ids, values = np.zeros((len(queries), keep), np.int64), np.full((len(queries), keep), -np.inf, np.float32)
    by_rank = np.arange(total - 1, -1, -1, dtype=np.int64)  # base is in the order of ids: the first wins a tie
    step = max(1, BLOCK_VALUES // total)
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        found = similarities(queries[part], base)
        if query_ids is not None:
            found[base_ids[None, :] == query_ids[part][:, None]] = -np.inf
        best = np.argpartition(_sortable(found) | by_rank, total - keep, axis=1)[:, total - keep :]
        ids[part], values[part] = base_ids[best], np.take_along_axis(found, best, 1)
    return rank(ids, values, k)


def _sortable(similarity: Float32) -> Int64:
    """float32 as int64 keys of the same order, the lower 32 bits free for a tie-break."""
    bits = similarity.view(np.int32).astype(np.int64)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32


def _without_useless_copies(base: Float32, base_ids: Int64, copies: int) -> Int64:
    """Rows of base in the order of ids, without vectors that so many equal ones of lower ids stand before."""
    order = np.argsort(base_ids, kind="stable")
    rows = np.ascontiguousarray(base[order] + np.float32(0))
    keys: Any = rows.view([("", f"V{rows.shape[1] * 4}")]).ravel()
    _, kind = np.unique(keys, return_inverse=True)
    by_kind = np.argsort(kind, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(kind[by_kind]) != 0]))
    place = np.arange(len(kind)) - np.repeat(starts, np.diff(np.append(starts, len(kind))))
    kept: Int64 = order[np.sort(by_kind[place < copies])]
    return kept
