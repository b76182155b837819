"""Users and their histories, from Arrow rows to the padded arrays that a model reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from solaris_udf.foundation.features import COUNTS, SEQUENCES, ModelError
from solaris_udf.foundation.items import Int64, ItemTable

Array = npt.NDArray[Any]
MICROS_PER_HOUR = 3.6e9
# Padded lengths are multiples of this: fewer distinct shapes for a compiler or a GPU, little padding wasted.
LENGTH_STEP = 8


@dataclass(frozen=True)
class Events:
    """The events of n users, oldest first: those at begins[u]..ends[u] of the flat arrays, which users may share."""

    begins: Int64
    ends: Int64
    item_id: Int64
    row: Int64  # in the item table, -1 if unknown
    time: Int64  # micros UTC
    clicked: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> Int64:
        return self.ends - self.begins


@dataclass(frozen=True)
class Users:
    """n users as they were at `at` [n] (micros UTC). counts: float32 [n, 4], log1p."""

    user_id: Int64
    at: Int64
    counts: npt.NDArray[np.float32]
    events: Mapping[str, Events]

    def __len__(self) -> int:
        return len(self.user_id)

    def longest(self) -> Int64:
        """Length of each user's longest sequence, [n]."""
        longest: Int64 = np.stack([events.lengths for events in self.events.values()]).max(axis=0)
        return longest

    def inputs(self, names: Sequence[str], users: Int64, items: ItemTable) -> dict[str, Array]:
        """The named user inputs of the users at these positions, padded to the longest of them."""
        out: dict[str, Array] = {}
        for sequence, events in self.events.items():
            wanted = [name for name in names if name.startswith(f"{sequence}_")]
            if wanted:
                out |= _padded(sequence, events, users, self.at[users], set(wanted), items)
        if "user_id" in names:
            out["user_id"] = self.user_id[users]
        if "user_counts" in names:
            out["user_counts"] = self.counts[users]
        return {name: out[name] for name in names}


def padded_length(longest: int) -> int:
    """The width a sequence of this length is padded to: a multiple of LENGTH_STEP, at least one step."""
    return max(1, -(-longest // LENGTH_STEP)) * LENGTH_STEP


def read_users(batch: pa.RecordBatch, lengths: Mapping[str, int], items: ItemTable) -> Users:
    """Users of a record batch with user_id, at, shown, clicked and the counts (see the inference input).

    Keeps each sequence's last `lengths` events strictly before `at`. Null lists are empty, null counts 0. Raises
    ModelError for a null user_id or at.
    """
    for name in ("user_id", "at"):
        if batch[name].null_count:
            raise ModelError(f"an input row has no {name}")
    at = _micros(batch["at"])
    counts = [pc.fill_null(batch[name], 0).to_numpy(zero_copy_only=False) for name in COUNTS]
    return Users(
        user_id=batch["user_id"].to_numpy(zero_copy_only=False).astype(np.int64, copy=False),
        at=at,
        counts=np.log1p(np.maximum(np.stack(counts, axis=1), 0)).astype(np.float32),
        events={name: _events(batch[name], at, lengths[name], items) for name in SEQUENCES},
    )


def _micros(times: pa.Array) -> Int64:
    if pa.types.is_timestamp(times.type):
        times = times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64())
    found: Int64 = times.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found


def _events(lists: pa.Array, at: Int64, length: int, items: ItemTable) -> Events:
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = lists.flatten()  # skips null lists, honours slices
    owner = np.repeat(np.arange(len(sizes)), sizes)
    time = _micros(flat.field("event_time"))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # The sequences are sorted by time, so the events before `at` come first and the kept ones are their last `length`.
    before = time < at[owner]
    known = np.bincount(owner, weights=before, minlength=len(sizes)).astype(np.int64)
    keep = before & (place >= known[owner] - length)
    item_id = flat.field("item_id").to_numpy(zero_copy_only=False).astype(np.int64, copy=False)[keep]
    names = [field.name for field in flat.type]
    clicked = (
        np.asarray(flat.field("clicked").to_numpy(zero_copy_only=False), dtype=bool)[keep]
        if "clicked" in names
        else np.ones(int(keep.sum()), dtype=bool)
    )
    ends = np.cumsum(np.bincount(owner[keep], minlength=len(sizes))).astype(np.int64)
    return Events(np.concatenate([[0], ends])[:-1], ends, item_id, items.rows_of(item_id), time[keep], clicked)


def _padded(
    sequence: str, events: Events, users: Int64, at: Int64, wanted: set[str], items: ItemTable
) -> dict[str, Array]:
    lengths = events.lengths[users]
    width = padded_length(int(lengths.max(initial=0)))
    owner = np.repeat(np.arange(len(users)), lengths)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = np.repeat(events.begins[users], lengths) + place
    target = owner * width + place

    def spread(values: Array) -> Array:
        out = np.zeros(len(users) * width, dtype=values.dtype)
        out[target] = values
        return out.reshape(len(users), width)

    makers: dict[str, Callable[[], Array]] = {
        "item": lambda: events.item_id[source],
        "category": lambda: items.category(events.row[source]),
        "advertiser": lambda: items.advertiser(events.row[source]),
        "age_hours": lambda: ((at[owner] - events.time[source]) / MICROS_PER_HOUR).astype(np.float32),
        "mask": lambda: np.ones(len(source), dtype=bool),
        "clicked": lambda: events.clicked[source],
    }
    return {name: spread(makers[name.removeprefix(f"{sequence}_")]()) for name in wanted}


def item_inputs(names: Sequence[str], item_ids: Int64, rows: Int64, at: Int64, items: ItemTable) -> dict[str, Array]:
    """The named item inputs of pairs: item ids, their rows in the item table, and the time to look from, each [P]."""
    makers: dict[str, Callable[[], Array]] = {
        "item_id": lambda: item_ids,
        "item_category": lambda: items.category(rows),
        "item_advertiser": lambda: items.advertiser(rows),
        "item_age_hours": lambda: items.age_hours(rows, at),
        "item_dense": lambda: items.dense(rows),
    }
    return {name: makers[name]() for name in names}
