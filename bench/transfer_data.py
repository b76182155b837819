"""The rows of bench/transfer.py: a log in memory, and what the foundation model says of each later row."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from solaris_udf.foundation.items import ITEM_SCHEMA, ItemTable, write_item_file
from solaris_udf.foundation.model import Model
from solaris_udf.foundation.reference import SIZES
from solaris_udf.foundation.samples import Samples
from solaris_udf.foundation.users import Events, Users, item_inputs
from solaris_udf.means import Weighting
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.tiers import PAIR, USER_MEAN
from solaris_udf.vertical_rows import Context, Rows, make_rows
from solaris_udf.world.ids import to_ids
from solaris_udf.world.log_rows import item_batches
from solaris_udf.world.parameters import HOUR, WorldParameters
from solaris_udf.world.simulate import Rows as Simulated
from solaris_udf.world.simulate import World, initial_state, simulate

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
WINDOW, MEAN_WINDOWS, COUNTER_HOURS = 6 * HOUR, 4, 72
GROUP = 2_000  # users encoded at once
START = 1_767_225_600_000_000  # 2026-01-01 UTC


@dataclass(frozen=True)
class Interactions:
    """A log in memory. Arrays of shown rows [n] in the order of user, time and item; users by number.

    start: microseconds, before every row. converted, truth, the world's own click
    probability: None where the log has none. scored,
    requests: sorted keys of every scored row and of every request.
    """

    start: int
    items: ItemTable
    user: Int64
    time: Int64
    item_id: Int64
    surface: Int64
    clicked: npt.NDArray[np.bool_]
    converted: npt.NDArray[np.bool_] | None
    truth: Float64 | None
    scored: Int64
    requests: Int64

    @classmethod
    def simulate(cls, world: str, users: int, items: int, hours: int) -> "Interactions":
        """The world of that name with seed 1, from its start."""
        parameters = WorldParameters(world=world, seed=1, users=users, items=items, start=START)
        made, end, parts = World(parameters), START + hours * HOUR, []
        for first in range(0, users, 1_000):
            state = initial_state(made, np.arange(first, min(users, first + 1_000)))
            while state.time < end:
                rows, state = simulate(made, state, state.time, min(end, state.time + 24 * HOUR), parameters.seed)
                parts.append(rows)
        rows = Simulated.concat(parts)
        scored = np.sort(key_of(rows.user, rows.event_time - START))
        order = np.flatnonzero(rows.shown)
        order = order[np.lexsort((rows.item[order], rows.event_time[order], rows.user[order]))]
        with tempfile.TemporaryDirectory() as folder:
            names = [field.name for field in ITEM_SCHEMA]
            batches = [batch.select(names) for batch in item_batches(made.items(end), end)]
            write_item_file(batches, Path(folder) / "items.arrow")
            table = ItemTable.open(Path(folder) / "items.arrow")  # mapped: it outlives the folder
        return cls(
            start=START,
            items=table,
            user=rows.user[order],
            time=rows.event_time[order],
            item_id=to_ids("item", rows.item[order]),
            surface=rows.surface[order],
            clicked=rows.clicked[order],
            converted=rows.converted[order],
            truth=rows.click_probability[order],
            scored=scored,
            requests=np.unique(scored),
        )

    def keys(self, user: Int64, time: Int64) -> Int64:
        """[n]: in the order of user, then time."""
        return key_of(user, time - self.start)

    def states(self, user: Int64, at: Int64, size: str) -> Users:
        """The users [m] as they were at those times: events and counters strictly before."""
        rows, keys = self.items.rows_of(self.item_id), self.keys(self.user, self.time)
        clicks = np.flatnonzero(self.clicked)
        begin, end = self.keys(user, np.full(len(user), self.start)), self.keys(user, at)

        def between(sorted_keys: Int64) -> tuple[Int64, Int64]:
            return np.searchsorted(sorted_keys, begin), np.searchsorted(sorted_keys, end)

        spans = [between(each) for each in (self.requests, self.scored, keys, keys[clicks])]
        counts = np.stack([last - first for first, last in spans], axis=1)
        lengths = SIZES[size]

        def events(span: tuple[Int64, Int64], chosen: Int64, length: int) -> Events:
            first, last = span
            return Events(
                np.maximum(first, last - length),
                last,
                self.item_id[chosen],
                rows[chosen],
                self.time[chosen],
                self.clicked[chosen],
            )

        return Users(
            user_id=to_ids("user", user),
            at=at,
            counts=np.log1p(counts).astype(np.float32),
            events={
                "clicked": events(spans[3], clicks, lengths.clicked_length),
                "shown": events(spans[2], np.arange(len(keys)), lengths.shown_length),
            },
        )


def key_of(user: Int64, since: Int64) -> Int64:
    """One number in the order of user, then time since the log's start, which must be less than 407 days."""
    return (user << np.int64(45)) | since


def training_samples(log: Interactions, size: str, before: int) -> Samples:
    """The shown rows before a time as train_foundation reads them: conversions, if the log has any, are known of clicks
    older than a day."""
    chosen = np.flatnonzero(log.time < before)
    user, time = log.user[chosen], log.time[chosen]
    new = np.r_[True, np.diff(log.keys(user, time)) != 0]
    clicked = log.clicked[chosen]
    labels = [clicked.astype(np.float32)]
    if log.converted is not None:
        known = clicked & (time < before - 24 * HOUR)
        labels.append(np.where(known, log.converted[chosen], np.nan).astype(np.float32))
    return Samples(
        log.states(user[new], time[new], size),
        np.cumsum(new) - 1,
        log.item_id[chosen],
        log.items.rows_of(log.item_id[chosen]),
        np.stack(labels, axis=1),
        log.items,
    )


@dataclass(frozen=True)
class ModelSays:
    """Shown rows from a time on, in the order of time: places in the log, and what the model says of them.

    known: start of each row's window. vector: from the history then, float32 [n, d]. click, fresh: click probability
    from the history then, and from that up to the row itself. truth: the world's own.
    """

    place: Int64
    time: Int64
    known: Int64
    vector: npt.NDArray[np.float32]
    click: Float64
    fresh: Float64
    truth: Float64 | None


def model_says(log: Interactions, model: Model, size: str, start: int) -> ModelSays:
    """What the model says of every row shown from start on."""
    place = np.flatnonzero(log.time >= start)
    place = place[np.argsort(log.time[place], kind="stable")]
    time = log.time[place]
    known = log.start + (time - log.start) // WINDOW * WINDOW
    vector, click = _answers(log, model, size, place, known)
    fresh = _answers(log, model, size, place, time)[1]
    truth = None if log.truth is None else log.truth[place]
    return ModelSays(place, time, known, vector.astype(np.float16).astype(np.float32), click, fresh, truth)


def _answers(
    log: Interactions, model: Model, size: str, place: Int64, at: Int64
) -> tuple[npt.NDArray[np.float32], Float64]:
    """Embedding and click probability of each row at `at`; each (user, at) is encoded once."""
    head = model.description.heads.index("click")
    user = log.user[place]
    _, first, entry = np.unique(log.keys(user, at), return_index=True, return_inverse=True)
    states = log.states(user[first], at[first], size)
    order, rows = np.argsort(entry, kind="stable"), log.items.rows_of(log.item_id[place])
    ends = np.searchsorted(entry[order], np.arange(len(first)), side="right")
    vector = np.zeros((len(place), model.description.embedding_dim), np.float32)
    logit = np.zeros(len(place))
    for begin in range(0, len(first), GROUP):
        group = np.arange(begin, min(begin + GROUP, len(first)))
        state = model.encode_users(states.inputs(model.description.names("user"), group, log.items))
        part = order[ends[begin - 1] if begin else 0 : ends[group[-1]]]
        names, item = model.description.names("item"), log.item_id[place[part]]
        inputs = item_inputs(names, item, rows[part], at[part], log.items)
        vector[part], logits = model.start_pairs(state, entry[part] - begin, inputs)()
        logit[part] = logits[:, head]
    return vector, 1 / (1 + np.exp(-logit))


def rows_of(
    log: Interactions, said: ModelSays, start: int, bought: npt.NDArray[np.bool_], half_life: float = 0.0
) -> tuple[Rows, Int64]:
    """The small model's rows, each with its own pair's vector and the user's mean if there is one, and their users.

    bought: the rows [n] whose pair's vector counts in the means of later windows: a pipeline knows no others.
    half_life: hours after which a vector counts half as much in a mean; 0: all the same.
    """
    user, item_id = log.user[said.place], log.item_id[said.place]
    item, count = log.items.rows_of(item_id), len(said.place)
    mean, newest = _user_means(user, (said.known - start) // WINDOW, said.vector, bought, half_life)
    has = newest >= 0
    counts = np.expm1(log.states(user, said.known, "demo").counts).round().astype(np.int64)
    served = Lookup(
        embedding=said.vector,
        tier=np.full(count, PAIR, np.uint8),
        age_seconds=((said.time - said.known) // 1_000_000).astype(np.int32),
        similarity=np.ones(count, np.float32),
        user_embedding=mean,
        user_tier=np.where(has, USER_MEAN, 0).astype(np.uint8),
        user_age_seconds=np.where(has, (said.time - start - newest * WINDOW) // 1_000_000, -1).astype(np.int32),
        user_similarity=has.astype(np.float32),
    )
    context = Context(
        user_id=to_ids("user", user),
        item_id=item_id,
        event_time=said.time,
        surface=log.surface[said.place],
        user_counts=counts[:, [0, 2, 3]],
        item_counts=_item_counts(log, item, said.known),
    )
    label = log.clicked[said.place].astype(np.float32)
    return make_rows(context, log.items, served, label, said.click.astype(np.float32)), user


def _user_means(
    user: Int64, window: Int64, vector: npt.NDArray[np.float32], bought: npt.NDArray[np.bool_], half_life: float
) -> tuple[npt.NDArray[np.float32], Int64]:
    """Mean vector of each row's user over the bought rows of the windows before it, weighted as aggregate_users weights
    them, and the last window in it, -1 for none."""
    back = np.arange(1, MEAN_WINDOWS + 1)
    weights = Weighting(0, half_life).weights(-back * WINDOW, np.ones(MEAN_WINDOWS))
    shape = (int(user.max()) + 1, int(window.max()) + 1)
    sums, sizes = np.zeros((*shape, vector.shape[1])), np.zeros(shape)
    np.add.at(sums, (user[bought], window[bought]), vector[bought])
    np.add.at(sizes, (user[bought], window[bought]), 1)
    total, size, newest = np.zeros((len(user), vector.shape[1])), np.zeros(len(user)), np.full(len(user), -1)
    for distance, weight in zip(back[::-1].tolist(), weights[::-1].tolist(), strict=True):
        there = np.flatnonzero(window >= distance)
        at = user[there], window[there] - distance
        total[there] += weight * sums[at]
        size[there] += weight * sizes[at]
        newest[there] = np.where(sizes[at] > 0, at[1], newest[there])
    return (total / np.where(size > 0, size, 1)[:, None]).astype(np.float32), newest


def _item_counts(log: Interactions, item: Int64, known: Int64) -> Int64:
    """Shown and clicked rows of each row's item in the COUNTER_HOURS before its window, [n, 2]."""
    every, found = log.items.rows_of(log.item_id), np.zeros((len(item), 2), np.int64)
    for moment in np.unique(known):
        recent = (log.time < moment) & (log.time >= moment - COUNTER_HOURS * HOUR)
        size, own = len(log.items), known == moment
        for column, chosen in enumerate((recent, recent & log.clicked)):
            found[own, column] = np.bincount(every[chosen], minlength=size)[item[own]]
    return found
