"""The memory-mapped tables of the shards that a reader holds, addressed as one, and the vectorized probe over them.

A batch's keys fall into every shard, and each shard has files of its own. A numpy call costs about a microsecond, so
one call a shard and column would cost more than the lookup itself. Therefore columns are read through views of the
process's memory that begin at its lowest mapped byte: a place in a view is an address, in whichever file.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import as_strided

from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.hashing import UInt64
from solaris_udf.snapshot.layout import BUCKETS_SCHEMA, NUMPY_TYPES, buckets_file, data_file, schema_of, shard_folder
from solaris_udf.snapshot.manifest import FileEntry, Manifest

Int64 = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]
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
        if buckets.rows < 2:
            raise SnapshotError(f"{folder / buckets.path} has no buckets")
        columns = {field.name: _as_numpy(batch.column(index), field.type) for index, field in enumerate(batch.schema)}
        starts = _as_numpy(offsets.column(0), pa.uint32())
        for array in (*columns.values(), starts):
            if array.nbytes and array.__array_interface__["data"][0] % 8:
                raise SnapshotError(f"{folder / data.path} is damaged: a column is not aligned to 8 bytes")
        return cls(data.rows, columns, starts, data.longest_bucket)


def _map_batch(folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.RecordBatch:
    path = folder / entry.path
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            if not reader.schema.equals(schema):
                raise SnapshotError(f"{path} has other columns than its manifest says (other dimensions or codec?)")
            if reader.num_record_batches != 1:
                raise SnapshotError(f"{path} has {reader.num_record_batches} record batches, must have one")
            batch = reader.get_batch(0)
            batch.validate()  # buffers are as long as the rows say; looks at no value
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
    if not len(array):
        return np.zeros(0, NUMPY_TYPES[kind])
    # Not array.to_numpy(): at its first call pyarrow imports pandas, if it is installed, which takes a second.
    return np.frombuffer(array.buffers()[1], NUMPY_TYPES[kind], len(array))


class _Bytes:
    """Hands numpy a stretch of this process's memory, and keeps the arrays alive that lie in it."""

    def __init__(self, address: int, count: int, kind: str, held: Sequence[AnyArray]) -> None:
        self.held = held
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": kind, "version": 3}


class Memory:
    """The memory from the lowest to the highest byte of some arrays. What lies between them is never touched: places
    come from those arrays' own bounds alone. Views are never written to, nor handed to numpy whole."""

    def __init__(self, arrays: Iterable[AnyArray]) -> None:
        self._held = [array for array in arrays if array.nbytes]
        addresses = [self._address(array) for array in self._held]
        self._origin = min(addresses) // 8 * 8
        ends = (address + array.nbytes for address, array in zip(addresses, self._held, strict=True))
        self._size = max(ends) - self._origin

    def view(self, kind: str) -> AnyArray:
        """All of it as items of a numeric type, which every array of that type is aligned to."""
        dtype = np.dtype(kind)
        return np.asarray(_Bytes(self._origin, self._size // dtype.itemsize, dtype.str, self._held))

    def windows(self, width: int) -> AnyArray:
        """A void[width] at every byte: place p is the width bytes from byte p on."""
        raw = np.asarray(_Bytes(self._origin, self._size // width, f"|V{width}", self._held))
        return as_strided(raw, shape=(self._size - width + 1,), strides=(1,), writeable=False)

    def place(self, array: AnyArray, itemsize: int) -> int:
        """Where an array begins, in items of that size; 0 for an empty one."""
        return (self._address(array) - self._origin) // itemsize if array.nbytes else 0

    @staticmethod
    def _address(array: AnyArray) -> int:
        address: int = array.__array_interface__["data"][0]
        return address


def _start(memory: Memory, name: str, part: MappedTable) -> int:
    column = part.columns[name]
    return memory.place(column, column.itemsize)


class Table:
    """The rows of one kind, pairs or users, in all the shards held.

    Arrays over shards have a value for each shard of the snapshot, 0 for those that are not held. starts: by column,
    the place of each shard's first row in the view of the column's type, so an embedding's in bytes.
    """

    def __init__(self, memory: Memory, parts: Mapping[int, MappedTable], shards: int) -> None:
        def by_shard(value: Callable[[MappedTable], int]) -> Int64:
            out = np.zeros(shards, np.int64)
            for shard, part in parts.items():
                out[shard] = value(part)
            return out

        self.rows = by_shard(lambda part: part.rows)
        self.buckets = by_shard(lambda part: len(part.offsets) - 1)
        self.longest_bucket = max((part.longest_bucket for part in parts.values()), default=0)
        self.offset_starts = by_shard(lambda part: memory.place(part.offsets, 4))
        self.offsets = memory.view("<u4")
        self.starts: dict[str, Int64] = {}
        self.views: dict[str, AnyArray] = {}
        for name, column in next(iter(parts.values())).columns.items() if parts else ():
            self.starts[name] = by_shard(partial(_start, memory, name))
            self.views[name] = memory.view(column.dtype.str)

    def probe(self, shard: Int64, hashes: UInt64, *ids: Int64) -> tuple[Int64, Int64]:
        """Which keys are in the table (places among the keys, ascending) and at which rows of their shards.

        shard, hashes and ids (user_ids, and in pairs item_ids) are [n]. Every row of every key's bucket is compared in
        one pass: a bucket holds one row on average, so there are about as many comparisons as keys. Raises
        SnapshotError if a bucket is not what the manifest says, before any row is touched.
        """
        place = ((hashes >> _32) * self.buckets.view(np.uint64).take(shard)) >> _32
        place = place.view(np.int64)
        place += self.offset_starts.take(shard)
        low = self.offsets.take(place).astype(np.int64)
        place += 1
        high = self.offsets.take(place).astype(np.int64)
        size = high - low
        # Unsigned, a negative size is a huge one.
        if len(size) and (
            int(size.view(np.uint64).max()) > self.longest_bucket or (high > self.rows.take(shard)).any()
        ):
            raise SnapshotError("the bucket offsets are damaged; verify the snapshot")
        ends = size.cumsum()
        keys = np.repeat(np.arange(len(size)), size)
        rows = np.arange(len(keys))
        rows += np.repeat(low - ends + size, size)
        for name, wanted in zip(("user_id", "item_id"), ids, strict=False):
            same = (self.column(name, shard.take(keys), rows) == wanted.take(keys)).nonzero()[0]
            if len(same) < len(keys):
                keys, rows = keys.take(same), rows.take(same)
        return keys, rows

    def column(self, name: str, shard: Int64, rows: Int64) -> AnyArray:
        """A column's values at rows of their shards, [n]."""
        place = self.starts[name].take(shard)
        place += rows
        values: AnyArray = self.views[name].take(place)
        return values

    def lists(self, name: str, shard: Int64, rows: Int64, size: int) -> AnyArray:
        """A list column's values at rows of their shards, [n, size]."""
        place = self.starts[name].take(shard) + rows * size
        values: AnyArray = self.views[name].take(place[:, None] + np.arange(size))
        return values

    def vectors(self, shard: Int64, rows: Int64, width: int) -> Int64:
        """Where the stored vectors of rows lie: places in Memory.windows(width)."""
        place = rows * width
        place += self.starts["embedding"].take(shard)
        return place
