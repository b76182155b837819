"""Writing one shard's Arrow files from rows in hash order, with little memory however many rows there are.

An Arrow file of one record batch has to be written whole, so columns are first spooled to temporary raw files and then
memory-mapped as the batch. What is held in memory: the batch at hand, and 4 bytes a row for the bucket offsets.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.snapshot.hashing import UInt64, bucket_of, hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.layout import (
    BUCKETS_SCHEMA,
    NUMPY_TYPES,
    PAIRS,
    ROWS_PER_BUCKET,
    buckets_file,
    data_file,
    schema_of,
)
from solaris_udf.snapshot.manifest import FileEntry

Columns = Mapping[str, npt.NDArray[np.generic]]


class TableWriter:
    """Writes pairs.arrow or users.arrow of one shard, with its bucket offsets.

    Rows come in ascending order of (hash, user_id, item_id); hash is unsigned, of the pair in pairs.arrow and of the
    user in users.arrow. Use as a context manager: the temporary files go when it ends.
    """

    def __init__(self, folder: Path, kind: str, shard: int, shards: int, width: int, neighbors: int) -> None:
        self._folder, self._kind = folder, kind
        self._shard, self._shards = shard, shards
        self._schema = schema_of(kind, width, neighbors)
        self._keys = ("user_id", "item_id") if kind == PAIRS else ("user_id",)
        self._spools: dict[str, BinaryIO] = {}
        self._tops: list[npt.NDArray[np.uint32]] = []
        self._last: tuple[int, ...] | None = None
        self.rows = 0

    def __enter__(self) -> "TableWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in self._schema.names:
            self._spools[name] = self._spool(name).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, file in self._spools.items():
            file.close()
            self._spool(name).unlink(missing_ok=True)

    def _spool(self, column: str) -> Path:
        return self._folder / f".{self._kind}.{column}.spool"

    def append(self, columns: Columns) -> None:
        """Adds rows: one array per column of the schema; embedding uint8 [n, width], neighbours [n, k], others [n].

        Raises ValueError if rows are out of order, repeated, or of another shard.
        """
        users = np.ascontiguousarray(columns["user_id"], dtype=np.int64)
        if not len(users):
            return
        hashes = hash_users(users)
        if (shard_of(hashes, self._shards) != self._shard).any():
            raise ValueError(f"rows of another shard than {self._shard} of {self._shards}")
        ids = [users]
        if self._kind == PAIRS:
            items = np.ascontiguousarray(columns["item_id"], dtype=np.int64)
            hashes = hash_pairs(hashes, items)
            ids.append(items)
        first = (int(hashes[0]), *(int(column[0]) for column in ids))
        if (self._last is not None and first <= self._last) or not _rises(hashes, ids):
            order = ", ".join(("hash", *self._keys))
            raise ValueError(f"{self._kind} rows are not in ascending order of ({order}), or one repeats")
        self._last = (int(hashes[-1]), *(int(column[-1]) for column in ids))
        for field in self._schema:
            kind = _physical(field.type)
            # Little-endian on disk, whatever the machine.
            self._spools[field.name].write(np.ascontiguousarray(columns[field.name]).astype(kind, copy=False).tobytes())
        self._tops.append((hashes >> np.uint64(32)).astype(np.uint32))
        self.rows += len(users)

    def finish(self) -> tuple[FileEntry, FileEntry]:
        """Writes the data file and its bucket offsets, flushed to the disk. Returns their manifest entries.

        Entry paths are relative to the snapshot's folder: the shard's folder name and the file's.
        """
        for file in self._spools.values():
            file.flush()
        tops = np.concatenate(self._tops) if self._tops else np.zeros(0, np.uint32)
        self._tops.clear()
        buckets = bucket_count(self.rows)
        offsets = np.searchsorted(bucket_of(tops.astype(np.uint64) << np.uint64(32), buckets), np.arange(buckets + 1))
        longest = int(np.diff(offsets).max())
        arrays = [self._mapped(field) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        data = _write(self._folder / data_file(self._kind), batch, longest)
        offset_column = pa.array(offsets.astype(np.uint32), type=pa.uint32())
        batch = pa.RecordBatch.from_arrays([offset_column], schema=BUCKETS_SCHEMA)
        return data, _write(self._folder / buckets_file(self._kind), batch, 0)

    def _mapped(self, field: pa.Field) -> pa.Array:
        path = self._spool(field.name)
        buffer = pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")
        if pa.types.is_fixed_size_list(field.type):
            values = pa.Array.from_buffers(field.type.value_type, self.rows * field.type.list_size, [None, buffer])
            return pa.Array.from_buffers(field.type, self.rows, [None], children=[values])
        return pa.Array.from_buffers(field.type, self.rows, [None, buffer])


def bucket_count(rows: int) -> int:
    """How many buckets a table of rows has: about one row a bucket, so a probe compares one or two rows."""
    return max(1, math.ceil(rows / ROWS_PER_BUCKET))


def _rises(hashes: UInt64, ids: list[npt.NDArray[np.int64]]) -> bool:
    """Whether (hash, ids...) strictly ascends."""
    higher = hashes[1:] > hashes[:-1]
    equal = hashes[1:] == hashes[:-1]
    for column in ids:
        higher |= equal & (column[1:] > column[:-1])
        equal &= column[1:] == column[:-1]
    return bool(higher.all())


def _physical(kind: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_binary(kind):
        return "u1"
    return NUMPY_TYPES[kind]


def _write(path: Path, batch: pa.RecordBatch, longest_bucket: int) -> FileEntry:
    with path.open("wb") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    name = f"{path.parent.name}/{path.name}"
    return FileEntry(name, batch.num_rows, path.stat().st_size, sha256_of(path), longest_bucket)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
