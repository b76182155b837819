"""Foundation-model inference on one worker: rows of users with item ids in, rows of pair embeddings out.

Users are sorted by history length and grouped so that no group holds more than `tokens` padded events; each group is
encoded once, then its pairs go through the pair head in batches of at most `tokens` events and `pairs` rows, so a user
with 200,000 items is one encoding and many batches. What is in memory at a time is one incoming Arrow batch (Spark cuts
those by bytes), one group, and two batches of pairs: on a GPU the next is prepared while the last is computed.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from solaris_udf.codec import encode
from solaris_udf.foundation.features import ModelError
from solaris_udf.foundation.items import Int64, ItemTable
from solaris_udf.foundation.model import Model, State, is_out_of_memory
from solaris_udf.foundation.users import LENGTH_STEP, Array, Users, item_inputs, padded_length, read_users

log = logging.getLogger("solaris")
T = TypeVar("T")
Wait = Callable[[], tuple[Array, ...]]
Finish = Callable[[], pa.RecordBatch]

TIMESTAMP = pa.timestamp("us", tz="UTC")
OUTPUT = pa.schema(
    [
        ("user_id", pa.int64()),
        ("at", TIMESTAMP),
        ("item_id", pa.int64()),
        ("probability", pa.float64()),
        ("embedding", pa.binary()),
        ("reason", pa.string()),
        ("logits", pa.list_(pa.float32())),
    ]
)
OUTPUT_DDL = (
    "user_id BIGINT, at TIMESTAMP, item_id BIGINT, probability DOUBLE, embedding BINARY, reason STRING, "
    "logits ARRAY<FLOAT>"
)
NOT_FINITE = "embedding is not finite"
NULL_ITEM = "item_id is null"
SMALL_GROUP = 16  # a group of less than this part of the tokens may hold several padded lengths


@dataclass(frozen=True)
class Limits:
    """Bounds of one batch. tokens: padded events of a group of users, and events that a batch of pairs attends to.
    pairs: pairs of a batch. bytes: memory of a group of users or a batch of pairs in the model; 0: unbounded.

    The defaults suit a CPU: large enough that torch's overhead per call is small, and small enough that what a batch
    writes is still in the cache when it is read. A GPU likes more.
    """

    tokens: int = 65_536
    pairs: int = 8_192
    bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.pairs < 1 or self.bytes < 0:
            raise ValueError(f"tokens and pairs must be at least 1, bytes at least 0: {self}")

    def group_tokens(self, bytes_per_token: float) -> int:
        """Padded events that a group of users may hold."""
        return max(1, min(self.tokens, self._fitting(bytes_per_token)))

    def batch_pairs(self, length: int, bytes_per_pair: float) -> int:
        """Pairs that a batch may hold whose users have at most `length` padded events."""
        return max(1, min(self.pairs, self.tokens // length, self._fitting(bytes_per_pair)))

    def _fitting(self, each: float) -> int:
        return int(self.bytes / each) if self.bytes and each else sys.maxsize


def embed_batches(
    batches: Iterable[pa.RecordBatch],
    model: Model,
    items: ItemTable,
    *,
    codec: str = "float16",
    logits: bool = False,
    limits: Limits | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields OUTPUT rows, one for each (row, item id) of the input, in no particular order.

    A pair's probability goes along untouched, if the input has any, so that no join has to bring it to the vector.

    A pair whose embedding is NaN, infinite (also when rounded to the codec) or of a wrong length has a null embedding
    and a reason. Lack of memory halves the batch. Raises ModelError if the model's outputs can't be matched to pairs,
    and MemoryError or torch's own error if a single pair does not fit into memory.
    """
    worker = _Worker(model, items, codec, logits, limits or Limits())
    started = (work for batch in batches if len(batch) for work in worker.start(batch))
    for finish in _one_behind(started):
        yield finish()


def _one_behind(values: Iterable[T]) -> Iterator[T]:
    """The same values, each only once the next was made."""
    last: list[T] = []
    for value in values:
        yield from last
        last = [value]
    yield from last


def plan_groups(lengths: Int64, tokens: int) -> list[Int64]:
    """Positions of users, sorted by length (ties by position), cut into groups of at most `tokens` padded events.

    A group ends where the padded length grows, unless it is small: then padding costs less than another call. A user
    longer than tokens is a group of its own.
    """
    order = np.argsort(lengths, kind="stable")
    widths = -(-np.maximum(lengths[order], 1) // LENGTH_STEP) * LENGTH_STEP
    grows = np.flatnonzero(np.diff(widths)) + 1
    groups, start = [], 0
    while start < len(order):
        # Sorted, so the last user of a group is its longest.
        events = np.arange(1, len(order) - start + 1) * widths[start:]
        end = start + max(1, int(np.searchsorted(events, tokens, side="right")))
        wider = grows[(grows > start) & (grows < end)]
        wider = wider[events[wider - start - 1] > tokens // SMALL_GROUP]
        end = int(wider[0]) if len(wider) else end
        groups.append(order[start:end])
        start = end
    return groups


@dataclass
class _Worker:
    model: Model
    items: ItemTable
    codec: str
    logits: bool
    limits: Limits

    def __post_init__(self) -> None:
        description = self.model.description
        self.user_names = description.names("user")
        self.item_names = description.names("item")
        self.bytes_per_token = self.model.user_bytes / max(description.lengths.values())
        if description.dense and description.dense != self.items.dense_width:
            raise ModelError(
                f"model {description.name} wants {description.dense} dense features an item, "
                f"the item table has {self.items.dense_width}"
            )

    def start(self, batch: pa.RecordBatch) -> Iterator[Finish]:
        """Starts the batch's work, piece by piece; each piece gives its OUTPUT rows when called."""
        users = read_users(batch, self.model.description.lengths, self.items)
        pairs = _Pairs.of(batch)
        if pairs.null_owner.size:
            yield partial(self._rejected, users, pairs.null_owner)
        lengths = users.longest()
        with_pairs = np.flatnonzero(np.diff(pairs.starts))
        for group in plan_groups(lengths[with_pairs], self.limits.group_tokens(self.bytes_per_token)):
            yield from self._start_group(users, with_pairs[group], pairs)

    def _start_group(self, users: Users, group: Int64, pairs: "_Pairs") -> Iterator[Finish]:
        """Encodes a group of users and starts on their pairs; on lack of memory, the group in two halves."""
        try:
            state = self.model.encode_users(users.inputs(self.user_names, group, self.items))
        except Exception as error:
            if not is_out_of_memory(error) or len(group) == 1:
                raise
            log.warning("out of memory with %s users at once, halving", len(group))
            state = None
        # Outside the handler: the exception's frames would keep the failed batch alive.
        if state is None:
            _free_memory()
            middle = len(group) // 2
            yield from self._start_group(users, group[:middle], pairs)
            yield from self._start_group(users, group[middle:], pairs)
            return
        owner, chosen = pairs.of_users(group)
        item_ids = pairs.item_id[chosen]
        longest = padded_length(int(users.longest()[group].max(initial=0)))
        start = 0
        while start < len(owner):
            step = min(len(owner) - start, self.limits.batch_pairs(longest, self.model.pair_bytes))
            part = slice(start, start + step)
            at = users.at[group[owner[part]]]
            wait = self._start_pairs(state, owner[part], item_ids[part], at)
            if wait is None:
                # Kept for what follows: the next batch would not fit either.
                self.limits = replace(self.limits, tokens=max(1, step * longest // 2), pairs=max(1, step // 2))
                log.warning("out of memory with %s pairs at once, going on with %s", step, self.limits.pairs)
                _free_memory()
                continue
            probability = pairs.probability_of(chosen[part])
            yield partial(self._rows, users.user_id[group[owner[part]]], at, item_ids[part], probability, wait)
            start += step

    def _start_pairs(self, state: State, owner: Int64, item_ids: Int64, at: Int64) -> Wait | None:
        """Starts one batch; None if it does not fit into memory."""
        rows = self.items.rows_of(item_ids)
        try:
            return self.model.start_pairs(state, owner, item_inputs(self.item_names, item_ids, rows, at, self.items))
        except Exception as error:
            if not is_out_of_memory(error) or len(owner) == 1:
                raise
            return None

    def _rows(self, user_id: Int64, at: Int64, item_id: Int64, probability: pa.Array, wait: Wait) -> pa.RecordBatch:
        embedding, logits = wait()
        if embedding.ndim != 2 or len(embedding) != len(item_id) or len(logits) != len(item_id):
            raise ModelError(
                f"model {self.model.description.name} gave embeddings {embedding.shape} and logits "
                f"{logits.shape} for {len(item_id)} pairs"
            )
        packed, reason = self._encoded(embedding)
        return pa.record_batch(
            [
                pa.array(user_id),
                pa.array(at).cast(TIMESTAMP),
                pa.array(item_id),
                probability,
                packed,
                reason,
                _lists(logits) if self.logits else pa.nulls(len(item_id), OUTPUT.field("logits").type),
            ],
            schema=OUTPUT,
        )

    def _encoded(self, embedding: Array) -> tuple[pa.Array, pa.Array]:
        """Stored vectors, null where one is refused, and the reasons of those."""
        count, dim = embedding.shape
        declared = self.model.description.embedding_dim
        if dim != declared:
            reason = f"embedding has {dim} dimensions, the model declares {declared}"
            return pa.nulls(count, pa.binary()), pa.array([reason] * count)
        try:
            return encode(embedding, self.codec), pa.nulls(count, pa.string())
        except ValueError:
            with np.errstate(over="ignore"):
                stored = embedding.astype(np.float16) if self.codec == "float16" else embedding
        good = np.isfinite(stored).all(axis=1)
        packed = encode(embedding[good], self.codec)
        places = pa.array(np.cumsum(good) - 1, mask=~good)
        reasons = pa.array(np.full(count, NOT_FINITE, dtype=object), mask=good, type=pa.string())
        return packed.take(places) if len(packed) else pa.nulls(count, pa.binary()), reasons

    def _rejected(self, users: Users, owner: Int64) -> pa.RecordBatch:
        count = len(owner)
        return pa.record_batch(
            [
                pa.array(users.user_id[owner]),
                pa.array(users.at[owner]).cast(TIMESTAMP),
                pa.nulls(count, pa.int64()),
                pa.nulls(count, pa.float64()),
                pa.nulls(count, pa.binary()),
                pa.array([NULL_ITEM] * count),
                pa.nulls(count, OUTPUT.field("logits").type),
            ],
            schema=OUTPUT,
        )


@dataclass(frozen=True)
class _Pairs:
    """Item ids of n rows, flat, without nulls; null_owner has the row of each null id. probability: one an item id, or
    None."""

    starts: Int64
    item_id: Int64
    probability: pa.Array | None
    null_owner: Int64

    def of_users(self, users: Int64) -> tuple[Int64, Int64]:
        """All pairs of the users at these positions: the place of each pair's user among them, and its own place."""
        sizes = self.starts[users + 1] - self.starts[users]
        owner = np.repeat(np.arange(len(users)), sizes)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return owner, np.repeat(self.starts[users], sizes) + place

    def probability_of(self, places: Int64) -> pa.Array:
        if self.probability is None:
            return pa.nulls(len(places), pa.float64())
        return self.probability.take(pa.array(places))

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> "_Pairs":
        lists = batch["item_ids"]
        flat = lists.flatten()
        sizes = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        valid = np.asarray(flat.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
        probability = batch["probabilities"].flatten() if "probabilities" in batch.schema.names else None
        if probability is not None and len(probability) != len(flat):
            raise ValueError(f"{len(probability)} probabilities for {len(flat)} item_ids")
        if probability is not None and not valid.all():
            probability = probability.filter(pa.array(valid))
        # drop_null keeps the ids int64; to_numpy of an array with nulls would make them floats.
        item_id = flat.drop_null().to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        starts = np.concatenate([[0], np.cumsum(np.bincount(owner[valid], minlength=len(sizes)))]).astype(np.int64)
        return cls(starts, item_id, probability, owner[~valid])


def _lists(values: Array) -> pa.Array:
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(len(values), -1)
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.reshape(-1)))


def _free_memory() -> None:
    """Gives cached GPU memory back before the retry; nothing to do without torch on CUDA."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
