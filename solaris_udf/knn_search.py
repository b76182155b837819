"""The stages of the distributed neighbour search, as functions over streams of Arrow batches (DataFrame.mapInArrow).

Vectors travel between stages as binary: little-endian float32, unit length, on the grid of solaris_udf.knn.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from solaris_udf.codec import decode
from solaris_udf.knn import Float32, Hits, Int64, no_hits, rank, task_threads, top_k, unit_vectors, use_threads
from solaris_udf.knn_cells import CellIndex, nearest_cells
from solaris_udf.knn_plan import Groups

Batches = Iterator[pa.RecordBatch]
NEIGHBORS = pa.list_(pa.struct([("user_id", pa.int64()), ("similarity", pa.float32())]))
NEIGHBORS_DDL = "ARRAY<STRUCT<user_id: BIGINT, similarity: FLOAT>>"

UNITS_DDL = "user_id BIGINT, embedding_micros BIGINT, vector BINARY, zero BOOLEAN, reason STRING"
FOUND_DDL = f"user_id BIGINT, embedding_micros BIGINT, cluster_id INT, neighbors {NEIGHBORS_DDL}"
ASSIGNED_DDL = "user_id BIGINT, embedding_micros BIGINT, vector BINARY, cell INT"
SAMPLE_DDL = "query INT, user_id BIGINT, similarity FLOAT, cell INT"
ROUTED_DDL = (
    "`group` INT, is_query BOOLEAN, user_id BIGINT, embedding_micros BIGINT, cell INT, vector BINARY, cells ARRAY<INT>"
)
# Lists that are still to be merged travel as binary: Spark unpacks and packs every nested value.
PARTIAL_DDL = "user_id BIGINT, embedding_micros BIGINT, cell INT, hits BINARY"
PACKED = np.dtype([("id", "<i8"), ("similarity", "<f4")])


def unit_rows(batches: Batches) -> Batches:
    """Stored embeddings (user_id, embedding_micros, embedding, codec) to UNITS_DDL.

    vector is null, with a reason, for a NaN or an Inf; zero says that there is no direction to compare.
    """
    for batch in batches:
        for codec in pc.unique(batch.column("codec")).to_pylist():
            rows = batch.filter(pc.equal(batch.column("codec"), codec))
            units, finite, zero = unit_vectors(decode(rows.column("embedding"), codec))
            bad = pa.array(~finite)
            nothing = pa.nulls(rows.num_rows, pa.string())
            yield pa.RecordBatch.from_arrays(
                [
                    rows.column("user_id"),
                    rows.column("embedding_micros"),
                    pc.if_else(bad, pa.nulls(rows.num_rows, pa.binary()), to_binary(units)),
                    pa.array(zero),
                    pc.if_else(bad, "the user embedding has a NaN or an Inf", nothing),
                ],
                names=["user_id", "embedding_micros", "vector", "zero", "reason"],
            )


def search_exactly(batches: Batches, base: Float32, base_ids: Int64, centroids: Float32, k: int) -> Batches:
    """UNITS_DDL rows with a vector to FOUND_DDL, against all base vectors [n, d]. Zero vectors get no neighbours."""
    use_threads(task_threads())
    for batch in batches:
        if batch.num_rows == 0:
            continue
        ids, zero = _ints(batch, "user_id"), np.asarray(batch.column("zero").to_numpy(zero_copy_only=False))
        live = np.flatnonzero(~zero)
        cluster = np.zeros(len(ids), dtype=np.int32)
        hits = no_hits(len(ids), k)
        if len(live):
            vectors = from_binary(batch.column("vector"))[live]
            cluster[live] = nearest_cells(vectors, centroids, 1)[:, 0]
            part = top_k(vectors, base, base_ids, k, ids[live])
            hits.ids[live], hits.similarity[live], hits.counts[live] = part.ids, part.similarity, part.counts
        yield pa.RecordBatch.from_arrays(
            [batch.column("user_id"), batch.column("embedding_micros"), pa.array(cluster), to_lists(hits)],
            names=["user_id", "embedding_micros", "cluster_id", "neighbors"],
        )


def assign_cells(batches: Batches, centroids: Float32) -> Batches:
    """Rows with a non-zero vector to ASSIGNED_DDL: the cell is the most similar centroid, the first of equal ones."""
    use_threads(task_threads())
    for batch in batches:
        if batch.num_rows:
            cell = nearest_cells(from_binary(batch.column("vector")), centroids, 1)[:, 0].astype(np.int32)
            yield pa.RecordBatch.from_arrays(
                [batch.column("user_id"), batch.column("embedding_micros"), batch.column("vector"), pa.array(cell)],
                names=["user_id", "embedding_micros", "vector", "cell"],
            )


def sample_neighbors(batches: Batches, queries: Float32, query_ids: Int64, k: int) -> Batches:
    """The nearest of the sampled queries [q, d] among the ASSIGNED_DDL rows of one task, as SAMPLE_DDL: at most q x k
    rows."""
    use_threads(task_threads())
    best = no_hits(len(queries), k)
    cells = np.zeros((len(queries), k), dtype=np.int64)
    for batch in batches:
        if batch.num_rows == 0:
            continue
        ids = _ints(batch, "user_id")
        order = np.argsort(ids)
        hits = top_k(queries, from_binary(batch.column("vector")), ids, k, query_ids)
        place = np.minimum(np.searchsorted(ids, hits.ids, sorter=order), len(ids) - 1)
        found_cells = _ints(batch, "cell")[order[place]]
        all_ids = np.concatenate([best.ids, hits.ids], axis=1)
        all_similarity = np.concatenate([best.similarity, hits.similarity], axis=1)
        all_cells = np.concatenate([cells, found_cells], axis=1)
        chosen = np.lexsort((all_ids, -all_similarity), axis=-1)[:, :k]
        similarity = np.take_along_axis(all_similarity, chosen, 1)
        best = Hits(np.take_along_axis(all_ids, chosen, 1), similarity, np.isfinite(similarity).sum(axis=1))
        cells = np.take_along_axis(all_cells, chosen, 1)
    real = np.isfinite(best.similarity)
    yield pa.RecordBatch.from_arrays(
        [
            pa.array(np.repeat(np.arange(len(queries), dtype=np.int32), best.counts)),
            pa.array(best.ids[real]),
            pa.array(best.similarity[real]),
            pa.array(cells[real].astype(np.int32)),
        ],
        names=["query", "user_id", "similarity", "cell"],
    )


def route_base(batches: Batches, groups: Groups) -> Batches:
    """ASSIGNED_DDL rows to ROUTED_DDL rows to be found: each user in the one group that holds them."""
    for batch in batches:
        ids, own = _ints(batch, "user_id"), _ints(batch, "cell")
        yield _routed(batch, groups.of(own, ids), False, np.arange(len(ids)), np.arange(len(ids) + 1), own)


def route_queries(batches: Batches, centroids: Float32, groups: Groups, probes: int) -> Batches:
    """ASSIGNED_DDL rows to ROUTED_DDL rows to search for: each user in every group that holds a part of one of their
    probed cells."""
    use_threads(task_threads())
    for batch in batches:
        if batch.num_rows == 0:
            continue
        probed = nearest_cells(from_binary(batch.column("vector")), centroids, probes)
        owner = np.repeat(np.arange(batch.num_rows), probed.shape[1])
        cell = probed.ravel()
        parts = groups.parts[cell]
        owner, cell = np.repeat(owner, parts), np.repeat(cell, parts)
        offset = np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
        group = groups.first[cell] + offset
        order = np.lexsort((cell, group, owner))
        owner, cell, group = owner[order], cell[order], group[order]
        starts = np.flatnonzero(np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(group) != 0)]))
        yield _routed(batch, group[starts], True, owner[starts], np.append(starts, len(cell)), cell)


def route(batches: Batches, centroids: Float32, groups: Groups, probes: int) -> Batches:
    """Both, for users who search among themselves."""
    for batch in batches:
        yield from route_base(iter([batch]), groups)
        yield from route_queries(iter([batch]), centroids, groups, probes)


def _routed(
    batch: pa.RecordBatch, group: Int64, is_query: bool, who: Int64, offsets: Int64, cells: Int64
) -> pa.RecordBatch:
    rows = batch.take(pa.array(who))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(group.astype(np.int32)),
            pa.array(np.full(len(who), is_query)),
            *(rows.column(name) for name in ("user_id", "embedding_micros", "cell", "vector")),
            pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(cells.astype(np.int32))),
        ],
        names=["group", "is_query", "user_id", "embedding_micros", "cell", "vector", "cells"],
    )


def search_groups(batches: Batches, k: int) -> Batches:
    """ROUTED_DDL rows, sorted by group and is_query (base first), to PARTIAL_DDL: each query's k nearest in the group.

    Holds the base vectors of one group and one batch of queries, however many queries come. Each query has its row,
    also where nothing is found.
    """
    use_threads(task_threads())
    group, parts, index = -1, list[pa.RecordBatch](), None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        groups, is_query = _ints(batch, "group"), batch.column("is_query").to_numpy(zero_copy_only=False)
        cuts = np.flatnonzero((np.diff(groups) != 0) | (is_query[1:] != is_query[:-1])) + 1
        for start, end in zip([0, *cuts], [*cuts, batch.num_rows], strict=True):
            rows = batch.slice(int(start), int(end - start))
            if groups[start] != group:
                group, parts, index = int(groups[start]), [], None
            if not is_query[start]:
                parts.append(rows)
            else:
                hits = no_hits(rows.num_rows, k)
                if parts:
                    index = index or _index_of(parts)
                    vectors = from_binary(rows.column("vector"))
                    hits = index.search(vectors, _ints(rows, "user_id"), rows.column("cells"), k)
                kept = [rows.column(name) for name in ("user_id", "embedding_micros", "cell")]
                yield pa.RecordBatch.from_arrays(
                    [*kept, _packed(hits)], names=["user_id", "embedding_micros", "cell", "hits"]
                )


def merge_hits(batches: Batches, k: int) -> Batches:
    """PARTIAL_DDL rows, sorted by user_id, to FOUND_DDL: the k best of each user's lists, most similar first, ties by
    id. A user sits in one group, so nobody comes twice."""
    held: pa.RecordBatch | None = None  # the last user's rows, who may go on in the next batch
    for batch in batches:
        rows = batch if held is None else pa.concat_batches([held, batch])
        if rows.num_rows == 0:
            continue
        last = int(np.searchsorted(_ints(rows, "user_id"), _ints(rows, "user_id")[-1]))
        held = rows.slice(last)
        if last:
            yield _merged(rows.slice(0, last), k)
    if held is not None:
        yield _merged(held, k)


def _merged(rows: pa.RecordBatch, k: int) -> pa.RecordBatch:
    users = _ints(rows, "user_id")
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    visits = np.diff(np.append(starts, len(users)))
    packed = from_binary(rows.column("hits")).view(PACKED).reshape(len(users), k)
    ids, similarity = packed["id"][starts], packed["similarity"][starts]
    for nth in range(1, int(visits.max())):
        who = np.flatnonzero(visits > nth)
        more = packed[starts[who] + nth]
        ids[who], similarity[who] = rank(
            np.concatenate([ids[who], more["id"]], axis=1),
            np.concatenate([similarity[who], more["similarity"]], axis=1),
            k,
        )
    first = rows.take(pa.array(starts))
    hits = Hits(ids, similarity, np.isfinite(similarity).sum(axis=1))
    return pa.RecordBatch.from_arrays(
        [*(first.column(name) for name in ("user_id", "embedding_micros", "cell")), to_lists(hits)],
        names=["user_id", "embedding_micros", "cluster_id", "neighbors"],
    )


def _packed(hits: Hits) -> pa.Array:
    """Hits as binary of one length, padding included."""
    packed = np.empty(hits.ids.shape, PACKED)
    packed["id"], packed["similarity"] = hits.ids, hits.similarity
    return to_binary(packed.view("<f4").reshape(len(packed), -1))


def _index_of(parts: list[pa.RecordBatch]) -> CellIndex:
    """From ROUTED_DDL base rows, whose `cells` hold one cell each."""
    table = pa.Table.from_batches(parts).combine_chunks()
    cells = pc.list_element(table.column("cells"), 0).to_numpy().astype(np.int64)
    return CellIndex(table.column("user_id").to_numpy(), from_binary(table.column("vector")), cells)


def to_binary(vectors: Float32) -> pa.Array:
    """float32 vectors [n, d] as binary of one length."""
    raw = np.ascontiguousarray(vectors, dtype="<f4")
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * np.int32(4 * raw.shape[1])
    return pa.Array.from_buffers(pa.binary(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(raw.tobytes())])


def from_binary(column: Any) -> Float32:
    """The inverse of to_binary. Raises ValueError if lengths differ."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if len(array) == 0:
        return np.zeros((0, 0), dtype=np.float32)
    lengths = pc.unique(pc.binary_length(array)).to_pylist()
    if len(lengths) != 1:
        raise ValueError(f"vectors of one model version differ in length: {sorted(lengths)} bytes")
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    raw = np.frombuffer(array.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    return np.frombuffer(raw.tobytes(), dtype="<f4").reshape(len(array), lengths[0] // 4)


def to_lists(hits: Hits) -> pa.Array:
    """Hits as list<struct<user_id, similarity>>, without the padding."""
    real = np.isfinite(hits.similarity)
    offsets = np.concatenate([[0], np.cumsum(hits.counts)]).astype(np.int32)
    values = pa.StructArray.from_arrays(
        [pa.array(hits.ids[real]), pa.array(hits.similarity[real])], fields=list(NEIGHBORS.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _ints(batch: pa.RecordBatch, name: str) -> Int64:
    values: Int64 = batch.column(name).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return values
