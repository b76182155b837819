"""Training samples: each shown row with its user's history as it was strictly before the row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from solaris_udf.foundation.items import Int64, ItemTable
from solaris_udf.foundation.users import Array, Events, Users, item_inputs

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Samples:
    """`users` has one entry per (user, time) with shown rows; row r belongs to entry state[r].

    labels: float32 [R, T], NaN where a label is not known (a conversion that may still come, or of a row not clicked).
    """

    users: Users
    state: Int64
    item_id: Int64
    row: Int64
    labels: Float32
    items: ItemTable

    def __len__(self) -> int:
        return len(self.state)

    @property
    def at(self) -> Int64:
        """Time of each row, micros UTC."""
        return self.users.at[self.state]

    def batch(self, states: Int64, user_names: tuple[str, ...], item_names: tuple[str, ...]) -> "Batch":
        """Inputs and labels of all rows of these entries."""
        first = np.searchsorted(self.state, states)
        sizes = np.searchsorted(self.state, states, side="right") - first
        owner = np.repeat(np.arange(len(states)), sizes)
        rows = np.repeat(first, sizes) + np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Batch(
            users=self.users.inputs(user_names, states, self.items),
            index=owner,
            items=item_inputs(item_names, self.item_id[rows], self.row[rows], self.at[rows], self.items),
            labels=self.labels[rows],
            rows=rows,
        )


@dataclass(frozen=True)
class Batch:
    """Model inputs of a few entries and their rows."""

    users: Mapping[str, Array]
    index: Int64
    items: Mapping[str, Array]
    labels: Float32
    rows: Int64


def read_samples(
    path: str | Path, items: ItemTable, lengths: Mapping[str, int], *, conversions: bool, mature_before: int
) -> Samples:
    """Samples from parquet files with one row per user: user_id, events and requests.

    events: list of (time micros, item_id, clicked, converted), requests: list of (time micros, scored), both sorted by
    time. conversions: whether there is a conversion label; it is known for clicked rows before mature_before (micros).
    """
    table = ds.dataset(str(path), format="parquet").to_table().sort_by("user_id").combine_chunks()
    sizes, event = _flat(table["events"])
    request_sizes, request = _flat(table["requests"])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    time, item_id = event["time"], event["item_id"]
    clicked = event["clicked"].astype(bool)
    start = np.cumsum(sizes) - sizes

    # An entry begins where user or time changes; its history is what stands before its first row.
    new = np.ones(len(time), dtype=bool)
    new[1:] = (owner[1:] != owner[:-1]) | (time[1:] != time[:-1])
    first = np.flatnonzero(new)
    user = owner[first]
    clicks_before = np.concatenate([[0], np.cumsum(clicked)])
    clicked_at = np.flatnonzero(clicked)
    rows = items.rows_of(item_id)

    def window(begin: Int64, end: Int64, length: int) -> tuple[Int64, Int64]:
        return np.maximum(begin, end - length), end

    shown = Events(*window(start[user], first, lengths["shown"]), item_id, rows, time, clicked)
    history = Events(
        *window(clicks_before[start[user]], clicks_before[first], lengths["clicked"]),
        item_id[clicked_at],
        rows[clicked_at],
        time[clicked_at],
        np.ones(len(clicked_at), dtype=bool),
    )

    # Requests strictly before the entry, by one sort over (user, time) of both.
    request_owner = np.repeat(np.arange(len(request_sizes)), request_sizes)
    before = _count_before(request_owner, request["time"], user, time[first])
    scored_total = np.concatenate([[0], np.cumsum(request["scored"])])
    request_start = np.cumsum(request_sizes) - request_sizes
    counts = np.stack(
        [
            before - request_start[user],
            scored_total[before] - scored_total[request_start[user]],
            first - start[user],
            clicks_before[first] - clicks_before[start[user]],
        ],
        axis=1,
    )
    labels = [clicked.astype(np.float32)]
    if conversions:
        labels.append(np.where(clicked & (time < mature_before), event["converted"], np.nan).astype(np.float32))
    users = Users(
        user_id=table["user_id"].to_numpy()[user],
        at=time[first],
        counts=np.log1p(counts).astype(np.float32),
        events={"clicked": history, "shown": shown},
    )
    return Samples(users, np.cumsum(new) - 1, item_id, rows, np.stack(labels, axis=1), items)


def _flat(lists: pa.ChunkedArray) -> tuple[Int64, dict[str, Array]]:
    column = lists.combine_chunks()
    column = column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)
    flat = column.flatten()
    sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes, {field.name: flat.field(field.name).to_numpy(zero_copy_only=False) for field in flat.type}


def _count_before(owner: Int64, time: Int64, query_owner: Int64, query_time: Int64) -> Int64:
    """How many (owner, time), sorted, stand before each query: its owner's earlier ones and all of smaller owners."""
    order = np.lexsort(
        (
            np.concatenate([np.ones(len(owner)), np.zeros(len(query_owner))]),
            np.concatenate([time, query_time]),
            np.concatenate([owner, query_owner]),
        )
    )
    is_event = order < len(owner)
    before = np.cumsum(is_event)
    found = np.empty(len(query_owner), dtype=np.int64)
    found[order[~is_event] - len(owner)] = before[~is_event]
    return found


def batches_of(lengths: Int64, states: Int64, size: int, seed: int) -> Iterator[Int64]:
    """The entries in batches of about equal history length, in an order that the seed fixes. No entry is left out.

    lengths: history length of each of `states`.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(states))
    batches = []
    for start in range(0, len(order), size * 32):
        part = order[start : start + size * 32]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[begin : begin + size] for begin in range(0, len(part), size)]
    for place in random.permutation(len(batches)):
        yield np.sort(states[batches[place]])
