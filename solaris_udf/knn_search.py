"""The stages of the distributed neighbour search, as functions over streams of Arrow batches (DataFrame.mapInArrow).

They read user embeddings as stored (STORED_DDL). Between them vectors travel as binary: little-endian float32, unit
length, on the grid of solaris_udf.knn.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from solaris_udf.knn import Bool, Float32, Hits, Int64, no_hits, rank, task_threads, top_k, use_threads
from solaris_udf.knn_cells import CellIndex, nearest_cells
from solaris_udf.knn_plan import Groups
from solaris_udf.knn_rows import (
    NEIGHBORS_DDL,
    from_binary,
    pack_cells,
    pack_hits,
    to_binary,
    to_lists,
    units_of,
    unpack_cells,
    unpack_hits,
)
from solaris_udf.means import ints, whole_users

Batches = Iterator[pa.RecordBatch]

STORED_DDL = "user_id BIGINT, embedding_micros BIGINT, embedding BINARY, codec STRING"
FOUND_DDL = f"user_id BIGINT, embedding_micros BIGINT, cluster_id INT, neighbors {NEIGHBORS_DDL}"
# A hit of a sampled query; or how many users probe a cell (cell null: have a zero vector); or a refused user.
SURVEY_DDL = (
    "query INT, user_id BIGINT, similarity FLOAT, cell INT, users BIGINT, embedding_micros BIGINT, reason STRING"
)
SURVEY = pa.schema(
    [
        ("query", pa.int32()),
        ("user_id", pa.int64()),
        ("similarity", pa.float32()),
        ("cell", pa.int32()),
        ("users", pa.int64()),
        ("embedding_micros", pa.int64()),
        ("reason", pa.string()),
    ]
)
NOT_FINITE = "the user embedding has a NaN or an Inf"
# A user to be found in a group (is_query false), who also searches its `cells` unless they are null; or one from
# elsewhere who searches them.
ROUTED_DDL = (
    "`group` INT, is_query BOOLEAN, user_id BIGINT, embedding_micros BIGINT, cell INT, vector BINARY, cells BINARY"
)
PARTIAL_DDL = "user_id BIGINT, embedding_micros BIGINT, cell INT, hits BINARY"


def search_exactly(batches: Batches, base: Float32, base_ids: Int64, centroids: Float32, k: int) -> Batches:
    """STORED_DDL rows to FOUND_DDL, against all base vectors [n, d]. Zero vectors get no neighbours, those that are not
    finite no row."""
    use_threads(task_threads())
    for batch in batches:
        if batch.num_rows == 0:
            continue
        ids, units, finite, zero = units_of(batch)
        live = np.flatnonzero(finite & ~zero)
        cluster = np.zeros(len(ids), dtype=np.int32)
        hits = no_hits(len(ids), k)
        if len(live):
            cluster[live] = nearest_cells(units[live], centroids, 1)[:, 0]
            part = top_k(units[live], base, base_ids, k, ids[live])
            hits.ids[live], hits.similarity[live], hits.counts[live] = part.ids, part.similarity, part.counts
        rows = pa.RecordBatch.from_arrays(
            [batch.column("user_id"), batch.column("embedding_micros"), pa.array(cluster), to_lists(hits)],
            names=["user_id", "embedding_micros", "cluster_id", "neighbors"],
        )
        yield rows if finite.all() else rows.filter(pa.array(finite))


def survey(batches: Batches, centroids: Float32, probes: int, queries: Float32, query_ids: Int64, k: int) -> Batches:
    """What has to be known before users are routed, as SURVEY_DDL, from STORED_DDL rows.

    Counts the users who have each cell among their nearest `probes`, refuses vectors that are not finite, and finds the
    nearest of the sampled queries [q, d] among the users of this task: at most q x k rows and one a cell.
    """
    use_threads(task_threads())
    counts, zeros = np.zeros(len(centroids), dtype=np.int64), 0
    best, best_cells = no_hits(len(queries), k), np.zeros((len(queries), k), dtype=np.int64)
    for batch in batches:
        if batch.num_rows == 0:
            continue
        ids, units, finite, zero = units_of(batch)
        if not finite.all():
            refused = batch.filter(pa.array(~finite))
            said = {name: refused.column(name) for name in ("user_id", "embedding_micros")}
            yield _surveyed(reason=pa.array([NOT_FINITE] * refused.num_rows), **said)
        live = finite & ~zero
        zeros += int(zero.sum())
        ids, units = (ids, units) if live.all() else (ids[live], units[live])
        if len(ids) == 0:
            continue
        probed = nearest_cells(units, centroids, probes)
        counts += np.bincount(probed.ravel(), minlength=len(centroids))
        hits, order = top_k(queries, units, ids, k, query_ids), np.argsort(ids)
        place = order[np.minimum(np.searchsorted(ids, hits.ids, sorter=order), len(ids) - 1)]
        all_ids = np.concatenate([best.ids, hits.ids], axis=1)
        all_similarity = np.concatenate([best.similarity, hits.similarity], axis=1)
        all_cells = np.concatenate([best_cells, probed[place, 0]], axis=1)
        chosen = np.lexsort((all_ids, -all_similarity), axis=-1)[:, :k]
        similarity = np.take_along_axis(all_similarity, chosen, 1)
        best = Hits(np.take_along_axis(all_ids, chosen, 1), similarity, np.isfinite(similarity).sum(axis=1))
        best_cells = np.take_along_axis(all_cells, chosen, 1)
    real = np.isfinite(best.similarity)
    yield _surveyed(
        query=pa.array(np.repeat(np.arange(len(queries), dtype=np.int32), best.counts)),
        user_id=pa.array(best.ids[real]),
        similarity=pa.array(best.similarity[real]),
        cell=pa.array(best_cells[real].astype(np.int32)),
    )
    used = np.flatnonzero(counts)
    yield _surveyed(cell=pa.array([None, *used.tolist()], pa.int32()), users=pa.array([zeros, *counts[used].tolist()]))


def _surveyed(**columns: pa.Array) -> pa.RecordBatch:
    """SURVEY_DDL rows, null in the columns that are not given."""
    rows = len(next(iter(columns.values())))
    return pa.RecordBatch.from_arrays(
        [columns.get(each.name, pa.nulls(rows, each.type)).cast(each.type) for each in SURVEY], schema=SURVEY
    )


def route(batches: Batches, centroids: Float32, groups: Groups, probes: int, *, found: bool) -> Batches:
    """STORED_DDL rows to ROUTED_DDL: each user in every group that holds a part of one of their probed cells.

    found: in their own group they can be found too. Zero vectors come out as queries without cells, those that are not
    finite not at all.
    """
    use_threads(task_threads())
    for batch in batches:
        if batch.num_rows == 0:
            continue
        all_ids, all_units, finite, zero = units_of(batch)
        live = np.flatnonzero(finite & ~zero)
        ids, units = all_ids[live], all_units[live]
        if len(live) < int(finite.sum()):
            none = np.flatnonzero(zero)
            nowhere = pack_cells(none[:0], np.zeros(len(none) + 1, np.int64))
            yield _routed(batch, all_units, all_ids[none] % groups.count, none >= 0, none, np.zeros_like(none), nowhere)
        if len(live) == 0:
            continue
        probed = nearest_cells(units, centroids, probes)
        home = groups.of(probed[:, 0], ids)
        owner, cell = np.repeat(np.arange(len(ids)), probed.shape[1]), probed.ravel()
        parts = groups.parts[cell]
        owner, cell = np.repeat(owner, parts), np.repeat(cell, parts)
        group = groups.first[cell] + np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
        order = np.lexsort((cell, group, owner))
        owner, cell, group = owner[order], cell[order], group[order]
        starts = np.flatnonzero(np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(group) != 0)]))
        who = owner[starts]
        is_query = (group[starts] != home[who]) | (not found)
        visits = pack_cells(cell, np.append(starts, len(cell)))
        yield _routed(batch, all_units, group[starts], is_query, live[who], probed[who, 0], visits)


def place(batches: Batches, groups: Groups) -> Batches:
    """STORED_DDL rows with their cell to ROUTED_DDL rows that are only to be found, in the one group of each user."""
    for batch in batches:
        if batch.num_rows == 0:
            continue
        ids, units, finite, zero = units_of(batch)
        live, cells = np.flatnonzero(finite & ~zero), ints(batch, "cell")
        group = groups.of(cells[live], ids[live])
        yield _routed(batch, units, group, live < 0, live, cells[live], pa.nulls(len(live), pa.binary()))


def _routed(
    batch: pa.RecordBatch, units: Float32, group: Int64, is_query: Bool, who: Int64, own: Int64, visits: pa.Array
) -> pa.RecordBatch:
    """ROUTED_DDL rows of the rows `who` [n] of the batch; units are of the whole batch."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array(group.astype(np.int32)),
            pa.array(is_query),
            *(batch.column(name).take(pa.array(who)) for name in ("user_id", "embedding_micros")),
            pa.array(own.astype(np.int32)),
            to_binary(units[who]),
            visits,
        ],
        names=["group", "is_query", "user_id", "embedding_micros", "cell", "vector", "cells"],
    )


def search_group(batches: Batches, k: int) -> Batches:
    """ROUTED_DDL rows of one group, those to be found first, to PARTIAL_DDL: the k nearest in the group of each user
    who searches in it.

    Holds the users of the group and one batch of queries, however many queries come. Each query has its row, also where
    nothing is found.
    """
    use_threads(task_threads())
    parts, index = list[pa.RecordBatch](), None
    for batch in batches:
        to_find = int(np.searchsorted(batch.column("is_query").to_numpy(zero_copy_only=False), True))
        if to_find:
            parts.append(batch.slice(0, to_find))
        if to_find < batch.num_rows:
            if index is None:
                index, own = _index_of(parts)
                yield from _answers(index, own, k)
            yield from _answers(index, batch.slice(to_find), k)
    if index is None:
        yield from _answers(*_index_of(parts), k)


def _index_of(parts: list[pa.RecordBatch]) -> tuple[CellIndex, pa.RecordBatch | None]:
    """From the rows to be found; also returns them as one."""
    if not parts:
        return CellIndex(np.zeros(0, np.int64), np.zeros((0, 0), np.float32), np.zeros(0, np.int64)), None
    rows = pa.concat_batches(parts)
    parts.clear()
    return CellIndex(ints(rows, "user_id"), from_binary(rows.column("vector")), ints(rows, "cell")), rows


def _answers(index: CellIndex, rows: pa.RecordBatch | None, k: int) -> Batches:
    """PARTIAL_DDL rows of those who search."""
    if rows is None:
        return
    rows = rows.filter(rows.column("cells").is_valid())
    if rows.num_rows:
        lengths, cells = unpack_cells(rows.column("cells"))
        hits = index.search(from_binary(rows.column("vector")), ints(rows, "user_id"), lengths, cells, k)
        kept = [rows.column(name) for name in ("user_id", "embedding_micros", "cell")]
        yield pa.RecordBatch.from_arrays(
            [*kept, pack_hits(hits)], names=["user_id", "embedding_micros", "cell", "hits"]
        )


def merge_hits(batches: Batches, k: int) -> Batches:
    """PARTIAL_DDL rows, sorted by user_id, to FOUND_DDL: the k best of each user's lists, most similar first, ties by
    id. A user sits in one group, so nobody comes twice."""
    for rows in whole_users(batches):
        yield _merged(rows, k)


def _merged(rows: pa.RecordBatch, k: int) -> pa.RecordBatch:
    users = ints(rows, "user_id")
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    visits = np.diff(np.append(starts, len(users)))
    all_ids, all_similarity = unpack_hits(rows.column("hits"), k)
    ids, similarity = all_ids[starts], all_similarity[starts]
    for nth in range(1, int(visits.max())):
        who = np.flatnonzero(visits > nth)
        more = starts[who] + nth
        ids[who], similarity[who] = rank(
            np.concatenate([ids[who], all_ids[more]], axis=1),
            np.concatenate([similarity[who], all_similarity[more]], axis=1),
            k,
        )
    first = rows.take(pa.array(starts))
    hits = Hits(ids, similarity, np.isfinite(similarity).sum(axis=1))
    return pa.RecordBatch.from_arrays(
        [*(first.column(name) for name in ("user_id", "embedding_micros", "cell")), to_lists(hits)],
        names=["user_id", "embedding_micros", "cluster_id", "neighbors"],
    )
