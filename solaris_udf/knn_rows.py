"""How vectors and lists of neighbours travel between the stages of a neighbour search: as Arrow columns.

What only our own stages read is binary: Spark unpacks and packs every nested value.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from solaris_udf.knn import Bool, Float32, Hits, Int64, unit_vectors
from solaris_udf.means import decode_each, ints

NEIGHBORS = pa.list_(pa.struct([("user_id", pa.int64()), ("similarity", pa.float32())]))
NEIGHBORS_DDL = "ARRAY<STRUCT<user_id: BIGINT, similarity: FLOAT>>"
PACKED = np.dtype([("id", "<i8"), ("similarity", "<f4")])


def units_of(batch: pa.RecordBatch) -> tuple[Int64, Float32, Bool, Bool]:
    """user ids [n], unit vectors [n, d], finite [n] and zero [n] of stored rows (user_id, embedding, codec).

    Raises ValueError if the vectors differ in length.
    """
    stored = decode_each(batch) if batch.num_rows else np.zeros((0, 0), np.float32)
    return (ints(batch, "user_id"), *unit_vectors(stored))


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """The table's rows as one batch."""
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], schema=table.schema)


def to_binary(vectors: Float32) -> pa.Array:
    """float32 vectors [n, d] as binary of one length."""
    raw = np.ascontiguousarray(vectors, dtype="<f4")
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * np.int32(4 * raw.shape[1])
    return pa.Array.from_buffers(pa.binary(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(raw)])


def from_binary(column: Any) -> Float32:
    """The inverse of to_binary. Raises ValueError if lengths differ."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if len(array) == 0:
        return np.zeros((0, 0), dtype=np.float32)
    lengths = pc.unique(pc.binary_length(array)).to_pylist()
    if len(lengths) != 1:
        raise ValueError(f"vectors of one model version differ in length: {sorted(lengths)} bytes")
    vectors: Float32 = _bytes_of(array)[0].view("<f4").reshape(len(array), lengths[0] // 4)
    return vectors


def pack_cells(cells: Int64, offsets: Int64) -> pa.Array:
    """Lists of cells as binary: the n-th is cells[offsets[n] : offsets[n + 1]], as int32."""
    raw = np.ascontiguousarray(cells, dtype="<i4")
    places = pa.py_buffer((offsets * 4).astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, places, pa.py_buffer(raw)])


def unpack_cells(column: pa.Array) -> tuple[Int64, Int64]:
    """The lengths [n] of the lists, and all their cells one after the other."""
    raw, offsets = _bytes_of(column)
    return np.diff(offsets).astype(np.int64) // 4, raw.view("<i4").astype(np.int64)


def pack_hits(hits: Hits) -> pa.Array:
    """Hits as binary of one length, padding included."""
    packed = np.empty(hits.ids.shape, PACKED)
    packed["id"], packed["similarity"] = hits.ids, hits.similarity
    return to_binary(packed.view("<f4").reshape(len(packed), -1))


def unpack_hits(column: pa.Array, k: int) -> tuple[Int64, Float32]:
    """ids and similarity [n, k], similarity -inf where padded."""
    packed = from_binary(column).view(PACKED).reshape(len(column), k)
    return packed["id"].copy(), packed["similarity"].copy()


def to_lists(hits: Hits) -> pa.Array:
    """Hits as list<struct<user_id, similarity>>, without the padding."""
    real = np.isfinite(hits.similarity)
    offsets = np.concatenate([[0], np.cumsum(hits.counts)]).astype(np.int32)
    values = pa.StructArray.from_arrays(
        [pa.array(hits.ids[real]), pa.array(hits.similarity[real])], fields=list(NEIGHBORS.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _bytes_of(array: pa.Array) -> tuple[Any, Any]:
    """The bytes of a binary column's rows, one after the other (a copy, aligned), and where each begins."""
    if len(array) == 0:
        return np.zeros(0, np.uint8), np.zeros(1, np.int32)
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    data = array.buffers()[2]
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return raw.copy(), offsets
