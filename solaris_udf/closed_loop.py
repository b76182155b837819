"""The simulated world run forward under a small model's ranking: one arm of an A/B test, for a few users at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from solaris_udf.foundation.items import ItemTable
from solaris_udf.metrics import by_user, losses
from solaris_udf.served import snapshot_at
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.vertical_model import VerticalModel
from solaris_udf.vertical_rows import Context, Rows, make_rows, surface_id
from solaris_udf.world.ids import to_ids
from solaris_udf.world.parameters import SURFACES, WorldParameters
from solaris_udf.world.ranking import Candidates, Ranker
from solaris_udf.world.simulate import Rows as WorldRows
from solaris_udf.world.simulate import World, simulate, state_at
from solaris_udf.world.state import State

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

SUMS = ("scored", "served", "shown", "clicks", "conversions", "revenue", "loss", "base_loss")
OUTPUT_DDL = "number BIGINT, arm STRING, " + ", ".join(f"{name} DOUBLE" for name in SUMS)


@dataclass(frozen=True)
class Arm:
    """What one arm does: the model that ranks, whether it reads snapshots, and which future its users live through."""

    name: str
    model: VerticalModel
    reads_snapshots: bool
    seed: int


@dataclass(frozen=True)
class Experiment:
    """Everything a task needs. Times are microseconds UTC.

    Snapshots: paths[i] answers from live_from[i] until the next; vectors of another model_version than the models were
    trained on count as not served. item_counts: item id -> (shown, clicked) before the window.
    """

    parameters: WorldParameters
    start: int
    end: int
    arms: Sequence[Arm]
    base: VerticalModel
    items_path: str
    paths: Sequence[str]
    live_from: Sequence[int]
    model_version: str
    dim: int
    item_counts: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def play(batches: Iterator[pa.RecordBatch], experiment: Experiment) -> Iterator[pa.RecordBatch]:
    """Runs every arm for the users of each batch (number, requests, shown_rows, clicked_rows: all BIGINT).

    Yields one row per user and arm, in the columns of OUTPUT_DDL: rows scored, served a vector, shown; clicks,
    conversions; revenue, the sum of bid times true click probability over what was shown, which is what the platform
    would earn on average; the log loss of the arm's model and of the base model, summed over the shown rows.
    """
    world = World(experiment.parameters)
    items = ItemTable.open(experiment.items_path)
    for batch in batches:
        if not batch.num_rows:
            continue
        counts = np.stack([batch[name].to_numpy() for name in ("requests", "shown_rows", "clicked_rows")], axis=1)
        numbers = batch["number"].to_numpy()
        order = np.argsort(numbers)
        reader = _Reader(experiment, items, to_ids("user", numbers[order]), counts[order])
        state = state_at(world, numbers[order], experiment.start)
        for arm in experiment.arms:
            yield _play_arm(world, state, arm, reader, numbers[order])


def _play_arm(world: World, state: State, arm: Arm, reader: "_Reader", numbers: Int64) -> pa.RecordBatch:
    experiment = reader.experiment
    rows, _ = simulate(world, state, experiment.start, experiment.end, arm.seed, reader.ranker(arm))
    place = np.searchsorted(numbers, rows.user)
    sums = _sums(world, rows, arm, reader, place, len(numbers))
    columns = [pa.array(numbers), pa.array([arm.name] * len(numbers)), *(pa.array(sums[name]) for name in SUMS)]
    return pa.RecordBatch.from_arrays(columns, names=["number", "arm", *SUMS])


def _sums(world: World, rows: WorldRows, arm: Arm, reader: "_Reader", place: Int64, users: int) -> dict[str, Float64]:
    """Each user's sums over the rows of one arm."""
    shown = rows.shown
    user_id, item_id = to_ids("user", rows.user), to_ids("item", rows.item)
    found, served = reader.rows(user_id, item_id, rows.event_time, rows.surface, arm.reads_snapshots)
    seen = found.take(shown)
    label = rows.clicked[shown].astype(np.float64)
    bid = world.items(reader.experiment.end).bid[rows.item]
    return {
        "scored": by_user(np.ones(len(rows)), place, users),
        "served": by_user(served, place, users),
        "shown": by_user(shown, place, users),
        "clicks": by_user(rows.clicked, place, users),
        "conversions": by_user(rows.converted, place, users),
        "revenue": by_user(np.where(shown, rows.click_probability * bid, 0.0), place, users),
        "loss": by_user(losses(label, arm.model.predict(seen)), place[shown], users),
        "base_loss": by_user(losses(label, reader.experiment.base.predict(seen)), place[shown], users),
    }


class _Reader:
    """Builds a model's rows for the requests of a batch of users, with what the snapshot live then serves."""

    def __init__(self, experiment: Experiment, items: ItemTable, user_id: Int64, user_counts: Int64) -> None:
        self.experiment = experiment
        self._items = items
        self._surfaces = surface_id(SURFACES)
        order = np.argsort(user_id)
        self._user_id, self._user_counts = user_id[order], user_counts[order]
        known = sorted(experiment.item_counts)
        self._item_id = np.array(known, dtype=np.int64)
        self._item_counts = np.array([*(experiment.item_counts[item] for item in known), (0, 0)], dtype=np.int64)

    def ranker(self, arm: Arm) -> Ranker:
        """Ranks by predicted click probability times bid."""

        def rank(candidates: Candidates) -> Float64:
            valid = candidates.valid
            request = np.nonzero(valid)[0]
            rows, _ = self.rows(
                candidates.user_id[request],
                candidates.item_id[valid],
                candidates.event_time[request],
                candidates.surface[request],
                arm.reads_snapshots,
            )
            scores = np.zeros(valid.shape)
            scores[valid] = arm.model.predict(rows) * candidates.items.bid[candidates.item[valid]]
            return scores

        return rank

    def rows(
        self, user_id: Int64, item_id: Int64, event_time: Int64, surface: Int64, reads_snapshots: bool
    ) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """(the model's rows, whether each was served a vector)."""
        context = Context(
            user_id=user_id,
            item_id=item_id,
            event_time=event_time,
            surface=self._surfaces[surface],
            user_counts=self._user_counts[np.searchsorted(self._user_id, user_id)],
            item_counts=self._item_counts[self._places(item_id)],
        )
        answer = self._lookup(user_id, item_id, event_time, reads_snapshots)
        return make_rows(context, self._items, answer), answer.tier > 0

    def _places(self, item_id: Int64) -> Int64:
        """Place of each item's counts; the last, zeros, where there are none."""
        if not len(self._item_id):
            return np.zeros(len(item_id), dtype=np.int64)
        place = np.minimum(np.searchsorted(self._item_id, item_id), len(self._item_id) - 1)
        return np.where(self._item_id[place] == item_id, place, len(self._item_id))

    def _lookup(self, user_id: Int64, item_id: Int64, at: Int64, reads_snapshots: bool) -> Lookup:
        dim = self.experiment.dim
        answer = Lookup.empty(len(user_id), dim, dim)
        if not reads_snapshots:
            return answer
        period = np.searchsorted(np.array(self.experiment.live_from, dtype=np.int64), at, side="right") - 1
        for index in np.unique(period[period >= 0]):
            snapshot = snapshot_at(self.experiment.paths[index])
            if snapshot.manifest.model_version != self.experiment.model_version:
                continue
            place = np.flatnonzero(period == index)
            found: Any = snapshot.lookup(user_id[place], item_id[place], at[place])
            for name in Lookup.__dataclass_fields__:
                getattr(answer, name)[place] = getattr(found, name)
        return answer
