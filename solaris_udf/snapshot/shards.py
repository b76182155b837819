"""The task of an export: sorted rows in, the Arrow files of their shards out. Used with DataFrame.mapInArrow."""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.codec import bytes_per_vector, decode, encode
from solaris_udf.snapshot.layout import PAIRS, USERS, shard_folder
from solaris_udf.snapshot.manifest import FileEntry
from solaris_udf.snapshot.storage import naming
from solaris_udf.snapshot.writer import TableWriter
from solaris_udf.tiers import COLD, NEIGHBOR_MEAN, USER_MEAN

USER_COLUMNS = ("user_id", "embedding", "codec", "computed_at", "tier", "source_user", "similarity", "neighbors")
# Columns of the input, in any order, sorted by (shard, kind, hash as unsigned, user_id, item_id, newest computed_at
# first). Of a pair that comes several times the newest counts. Rows of pairs have nulls in the last four of
# USER_COLUMNS (or no neighbors), rows of users 0 as item_id.
INPUT_COLUMNS = ("shard", "kind", "item_id", *USER_COLUMNS)
KIND_CODES = {PAIRS: 0, USERS: 1}
OUTPUT_SCHEMA = pa.schema([("shard", pa.int32()), ("summary", pa.string())])
OUTPUT_DDL = "shard INT, summary STRING"


@dataclass
class ShardSummary:
    """What one shard's files hold. faults counts refused vectors by reason; an export with any is not published."""

    shard: int
    dim: int
    files: list[FileEntry] = field(default_factory=list)
    pairs: int = 0
    users_own: int = 0
    users_neighbor: int = 0
    users_cold: int = 0
    norm_sum: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "ShardSummary":
        raw: dict[str, Any] = json.loads(text)
        raw["files"] = [FileEntry(**entry) for entry in raw["files"]]
        return cls(**raw)


def write_shards(
    batches: Iterator[pa.RecordBatch], *, folder: str, shards: int, codec: str, dim: int | None, neighbors: int
) -> Iterator[pa.RecordBatch]:
    """Writes every shard whose rows come by, and yields (shard, summary JSON) for each.

    A shard's rows must all come in one call, in the order of INPUT_COLUMNS' comment. Each attempt writes to its own
    folder and moves finished files into place, and the same rows give the same bytes, so retried or speculative tasks
    do no harm. dim None: that of the first vector. Vectors of another codec are encoded anew.
    """
    task: _ShardTask | None = None
    try:
        for batch in batches:
            shard_column = batch.column("shard").to_numpy()
            edges = np.flatnonzero(np.diff(shard_column)) + 1
            for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(shard_column)], strict=True):
                if start == end:
                    continue
                shard = int(shard_column[start])
                if task is not None and task.shard != shard:
                    yield task.finish()
                    task = None
                if task is None:
                    task = _ShardTask(Path(folder), shard, shards, codec, dim, neighbors)
                task.add(batch.slice(start, end - start))
        if task is not None:
            yield task.finish()
            task = None
    finally:
        if task is not None:
            task.abandon()


def write_empty_shard(folder: str, shard: int, shards: int, codec: str, dim: int, neighbors: int) -> ShardSummary:
    """The files of a shard without rows."""
    task = _ShardTask(Path(folder), shard, shards, codec, dim, neighbors)
    try:
        return ShardSummary.parse(task.finish().column("summary")[0].as_py())
    finally:
        task.abandon()


class _ShardTask:
    def __init__(self, folder: Path, shard: int, shards: int, codec: str, dim: int | None, neighbors: int) -> None:
        self.shard, self._shards, self._codec, self._dim, self._neighbors = shard, shards, codec, dim, neighbors
        self._folder, self._target = folder, folder / shard_folder(shard, shards)
        self._own = folder / f".attempt-{uuid.uuid4().hex}" / self._target.name
        self._stack = ExitStack()
        self._writers: dict[str, TableWriter] = {}
        self._summary = ShardSummary(shard, dim or 0)
        self._norms: list[npt.NDArray[np.float32]] = []
        self._last_pair: tuple[int, int] | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        kinds = batch.column("kind").to_numpy()
        users_from = int(np.searchsorted(kinds, KIND_CODES[USERS]))
        with naming(self._folder):
            self._add(PAIRS, self._newest(batch.slice(0, users_from)))
            self._add(USERS, batch.slice(users_from))

    def _newest(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that do not repeat the pair of the row before, in this batch or the one before it."""
        if not batch.num_rows:
            return batch
        users, items = batch.column("user_id").to_numpy(), batch.column("item_id").to_numpy()
        new = np.ones(len(users), np.bool_)
        new[1:] = (users[1:] != users[:-1]) | (items[1:] != items[:-1])
        new[0] = self._last_pair != (int(users[0]), int(items[0]))
        self._last_pair = int(users[-1]), int(items[-1])
        return batch if new.all() else batch.filter(pa.array(new))

    def _add(self, kind: str, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._dim is None:
            self._dim = _dim_of(batch.column("embedding")[0].as_py(), batch.column("codec")[0].as_py())
            self._summary.dim = self._dim
        raw, vectors, good = self._vectors(batch)
        if not good.all():
            batch = batch.filter(pa.array(good))
        columns: dict[str, npt.NDArray[Any]] = {
            "user_id": batch.column("user_id").to_numpy(),
            "embedding": raw[good],
            "computed_at": batch.column("computed_at").to_numpy(),
        }
        if kind == PAIRS:
            columns["item_id"] = batch.column("item_id").to_numpy()
            self._norms.append(np.linalg.norm(vectors[good], axis=1).astype(np.float32))
            self._summary.pairs += batch.num_rows
        else:
            columns |= {name: batch.column(name).to_numpy() for name in ("tier", "source_user", "similarity")}
            columns |= _padded(batch.column("neighbors"), self._neighbors)
            self._summary.users_own += int((columns["tier"] == USER_MEAN).sum())
            self._summary.users_neighbor += int((columns["tier"] == NEIGHBOR_MEAN).sum())
            self._summary.users_cold += int((columns["tier"] == COLD).sum())
        self._writer(kind).append(columns)

    def _vectors(
        self, batch: pa.RecordBatch
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Stored bytes uint8 [n, width], their values [n, d], and which rows are good; bad ones are counted."""
        assert self._dim is not None
        width = bytes_per_vector(self._dim, self._codec)
        raw = np.zeros((batch.num_rows, width), np.uint8)
        values = np.zeros((batch.num_rows, self._dim), np.float32)
        good = np.zeros(batch.num_rows, np.bool_)
        packed, named = batch.column("embedding"), batch.column("codec")
        lengths = np.asarray(pa.compute.binary_length(packed).fill_null(-1))
        fits = np.zeros(batch.num_rows, np.bool_)
        for codec in sorted(pa.compute.unique(named).to_pylist()):
            found_here = np.asarray(pa.compute.equal(named, codec)) & (lengths == bytes_per_vector(self._dim, codec))
            fits |= found_here
            rows = np.flatnonzero(found_here)
            if not len(rows):
                continue
            chosen = packed.take(pa.array(rows))
            found = decode(chosen, codec)
            finite = np.asarray(np.isfinite(found).all(axis=1))
            if codec != self._codec:
                found = np.where(finite[:, None], found, 0)
                chosen = encode(found, self._codec)
                found = decode(chosen, self._codec)
            values[rows], good[rows] = found, finite
            raw[rows] = np.frombuffer(chosen.buffers()[2], np.uint8)[: len(rows) * width].reshape(len(rows), width)
            self._fault("not finite", int((~finite).sum()))
        self._fault(f"not of {self._dim} dimensions", int((~fits).sum()))
        return raw, values, good

    def _fault(self, reason: str, count: int) -> None:
        if count:
            self._summary.faults[reason] = self._summary.faults.get(reason, 0) + count

    def _writer(self, kind: str) -> TableWriter:
        if kind not in self._writers:
            assert self._dim is not None
            width = bytes_per_vector(self._dim, self._codec)
            writer = TableWriter(self._own, kind, self.shard, self._shards, width, self._neighbors)
            self._writers[kind] = self._stack.enter_context(writer)
        return self._writers[kind]

    def finish(self) -> pa.RecordBatch:
        with naming(self._folder), self._stack:
            for kind in (PAIRS, USERS):
                self._summary.files.extend(self._writer(kind).finish())
        self._target.mkdir(parents=True, exist_ok=True)
        for entry in self._summary.files:
            name = Path(entry.path).name
            (self._own / name).replace(self._target / name)
        shutil.rmtree(self._own.parent)
        if self._norms:
            # One sum over the whole shard: the same whatever the batches were.
            self._summary.norm_sum = float(np.concatenate(self._norms).astype(np.float64).sum())
        return pa.RecordBatch.from_arrays(
            [pa.array([self.shard], pa.int32()), pa.array([self._summary.to_json()])], schema=OUTPUT_SCHEMA
        )

    def abandon(self) -> None:
        self._stack.close()
        shutil.rmtree(self._own.parent, ignore_errors=True)


def _dim_of(packed: bytes, codec: str) -> int:
    return len(packed) // 2 if codec == "float16" else len(packed) - 4


def _padded(lists: pa.Array, size: int) -> dict[str, npt.NDArray[Any]]:
    """The neighbour columns from list<struct<user_id, similarity>>: at most size each, zeros after the last."""
    counts = np.asarray(pa.compute.list_value_length(lists).fill_null(0), dtype=np.int64)
    flat = lists.flatten()
    row = np.repeat(np.arange(len(lists)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    keep = place < size
    ids, similarities = np.zeros((len(lists), size), np.int64), np.zeros((len(lists), size), np.float32)
    ids[row[keep], place[keep]] = flat.field("user_id").to_numpy()[keep]
    similarities[row[keep], place[keep]] = flat.field("similarity").to_numpy()[keep]
    filled = np.minimum(counts, size).astype(np.uint8)
    return {"neighbor_count": filled, "neighbor_ids": ids, "neighbor_similarities": similarities}
