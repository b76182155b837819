"""One memory-mapped table of one shard, its bucket offsets, and the vectorized probe over several of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.hashing import UInt64
from solaris_udf.snapshot.layout import BUCKETS_SCHEMA, buckets_file, data_file, schema_of, shard_folder
from solaris_udf.snapshot.manifest import FileEntry, Manifest

Int64 = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]
ArrayT = TypeVar("ArrayT", bound=AnyArray)
_32 = np.uint64(32)


@dataclass(frozen=True)
class MappedTable:
    """The columns of one shard's pairs.arrow or users.arrow as arrays over the mapped file; nothing is copied.

    columns: by name, [rows] or [rows, k]; embedding is uint8 [rows, width]. offsets: uint32 [buckets + 1].
    """

    rows: int
    columns: Mapping[str, AnyArray]
    offsets: npt.NDArray[np.uint32]
    longest_bucket: int

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, kind: str, shard: int) -> "MappedTable":
        """Maps the two files of one table. Raises SnapshotError if they are not what the manifest says."""
        entries = {entry.path: entry for entry in manifest.files}
        data = entries[f"{shard_folder(shard, manifest.shards)}/{data_file(kind)}"]
        buckets = entries[f"{shard_folder(shard, manifest.shards)}/{buckets_file(kind)}"]
        batch = _map_batch(folder, data, schema_of(kind, manifest.width, manifest.neighbors))
        offsets = _map_batch(folder, buckets, BUCKETS_SCHEMA)
        columns = {field.name: _as_numpy(batch.column(index), field.type) for index, field in enumerate(batch.schema)}
        if buckets.rows < 2:
            raise SnapshotError(f"{folder / buckets.path} has no buckets")
        return cls(data.rows, columns, _as_numpy(offsets.column(0), pa.uint32()), data.longest_bucket)

    @property
    def buckets(self) -> int:
        return len(self.offsets) - 1


def _map_batch(folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.RecordBatch:
    path = folder / entry.path
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            if not reader.schema.equals(schema):
                raise SnapshotError(f"{path} has other columns than its manifest says (other dimensions or codec?)")
            if reader.num_record_batches != 1:
                raise SnapshotError(f"{path} has {reader.num_record_batches} record batches, must have one")
            batch = reader.get_batch(0)
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing") from None
    except SnapshotError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise SnapshotError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    if batch.num_rows != entry.rows:
        raise SnapshotError(f"{path} has {batch.num_rows} rows, its manifest says {entry.rows}")
    return batch


def _as_numpy(array: pa.Array, kind: pa.DataType) -> AnyArray:
    if array.null_count:
        raise SnapshotError("a snapshot column has nulls")
    if pa.types.is_fixed_size_list(kind):
        return _as_numpy(array.values, kind.value_type).reshape(len(array), kind.list_size)
    if pa.types.is_fixed_size_binary(kind):
        if not len(array):
            return np.zeros((0, kind.byte_width), np.uint8)
        raw = np.frombuffer(array.buffers()[1], np.uint8, len(array) * kind.byte_width)
        return raw.reshape(len(array), kind.byte_width)
    values: AnyArray = array.to_numpy(zero_copy_only=True)
    return values


@dataclass(frozen=True)
class Groups:
    """Keys arranged shard by shard. order: int64 [n], None if they are in order; spans: (shard, start, end) of each."""

    count: int
    order: Int64 | None
    spans: Sequence[tuple[int, int, int]]

    @classmethod
    def by_shard(cls, shard: Int64, shards: int) -> "Groups":
        """shard: int64 [n], the shard of each key."""
        count = len(shard)
        if count == 0:
            return cls(0, None, ())
        first = int(shard[0])
        if shards == 1 or (shard == first).all():
            return cls(count, None, ((first, 0, count),))
        ends = np.cumsum(np.bincount(shard, minlength=shards))
        # Small integers take numpy's radix sort, which is several times as fast.
        order = np.argsort(shard.astype(np.uint16) if shards <= 1 << 16 else shard, kind="stable")
        starts = np.concatenate(([0], ends[:-1]))
        held = np.flatnonzero(ends > starts)
        return cls(count, order, tuple(zip(held.tolist(), starts[held].tolist(), ends[held].tolist(), strict=True)))

    def subset(self, keys: Int64) -> "Groups":
        """The groups of some keys, given by their places in ascending order."""
        edges = np.searchsorted(keys, [start for _, start, _ in self.spans] + [self.count]).tolist()
        spans = zip((shard for shard, _, _ in self.spans), edges, edges[1:], strict=False)
        return Groups(len(keys), None, tuple(span for span in spans if span[2] > span[1]))

    def arrange(self, values: ArrayT) -> ArrayT:
        """values in the order of the groups."""
        return values if self.order is None else values.take(self.order, axis=0)  # type: ignore[return-value]


def probe(tables: Mapping[int, MappedTable], groups: Groups, hashes: UInt64, keys: Mapping[str, Int64]) -> Int64:
    """The row of each key in its shard's table, -1 where it is not there. int64 [n].

    hashes and keys are arranged by groups. Every row of every key's bucket is compared in one vectorized pass: a bucket
    holds one row on average, so there are about as many comparisons as keys.
    """
    count = groups.count
    low, size = np.zeros(count, np.int64), np.zeros(count, np.int64)
    high_bits = hashes >> _32
    for shard, start, end in groups.spans:
        table = tables[shard]
        if table.rows:
            bucket = ((high_bits[start:end] * np.uint64(table.buckets)) >> _32).view(np.int64)
            first = table.offsets.take(bucket, mode="clip")
            low[start:end] = first
            bucket += 1
            size[start:end] = table.offsets.take(bucket, mode="clip") - first
            if int(size[start:end].max()) > table.longest_bucket:
                raise SnapshotError(f"the bucket offsets of shard {shard} are damaged; verify the snapshot")
    ends = size.cumsum()
    total = int(ends[-1]) if count else 0
    owner = np.repeat(np.arange(count), size)
    position = np.arange(total)
    position += np.repeat(low - ends + size, size)
    found = np.full(count, -1, np.int64)
    names = list(keys)
    for shard, start, end in groups.spans:
        table = tables[shard]
        here = slice(int(ends[start] - size[start]), int(ends[end - 1]))
        rows, owners = position[here], owner[here]
        for name in names:
            # Damaged offsets can't lead out of the file: clip, and the comparison fails.
            same = (table.columns[name].take(rows, mode="clip") == keys[name].take(owners)).nonzero()[0]
            rows, owners = rows.take(same), owners.take(same)
        found[owners] = rows
    return found


def gather(tables: Mapping[int, MappedTable], groups: Groups, rows: Int64, column: str, out: ArrayT) -> ArrayT:
    """Fills out [n, ...] with a column's values at rows, arranged by groups. At row -1 the value means nothing."""
    for shard, start, end in groups.spans:
        values = tables[shard].columns[column]
        if len(values):
            values.take(rows[start:end], axis=0, mode="clip", out=out[start:end])
    return out


def copy_vectors(
    tables: Mapping[int, MappedTable],
    groups: Groups,
    rows: Int64,
    wanted: npt.NDArray[np.bool_],
    out: npt.NDArray[np.uint8],
) -> None:
    """Copies the stored vectors of the wanted keys (bool [n], arranged by groups) into out, uint8 [n, width]."""
    for shard, start, end in groups.spans:
        keys = wanted[start:end].nonzero()[0]
        if len(keys):
            keys += start
            out[keys] = tables[shard].columns["embedding"].take(rows.take(keys), axis=0, mode="clip")
