"""What of the foundation model reaches a small model, without the pipeline around it: one process, no Spark.

Per log, with the project's own foundation model, small model and metrics: two simulated worlds of 3,000 users and 800
campaigns (standard, and hard, whose ground truth differs), and MovieLens 100K (--world movielens-100k, fetched). The
foundation model trains on six days, at two learning rates, of which the one that is better on the last tenth of those
days is kept. Every row shown later gets the embedding of its pair from the history at the start of its six-hour window,
as embed_pairs would compute it. Small models train on the rows of the next 36 hours and are judged on those of the 24
hours after (MovieLens: 140, 40 and 35 days). `embeddings` keeps the pairs of a random half of the rows, about what a
budget covers, and gives every row the user's mean vector of the windows of the 24 hours before; `every_pair` keeps all.
The sweep coverage has pairs alone. Which pairs a budget covers, neighbours, expiry and late rows are left to
bench/uplift.py. --sweeps: also models that saw less of the last days, and vectors of other dimensions, each a training
of its own; and user means in which younger vectors count more, beside the pairs and alone, where rll_added is RLL
against the plain mean. --quick: 400 users; its figures say nothing.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from measure import Figure, arguments, report
from transfer_data import Interactions, ModelSays, model_says, rows_of, training_samples
from transfer_movielens import movielens
from uplift_figures import Found, judged, show

from jobs.common.session import PROJECT
from jobs.common.terminal import console
from solaris_udf.foundation.model import load_model
from solaris_udf.foundation.training import Plan, train
from solaris_udf.tiers import PAIR
from solaris_udf.uplift import ALL_SEEDS, BASE, FM, FRESH, figures
from solaris_udf.vertical_model import FEATURE_SETS, Schedule
from solaris_udf.vertical_model import train as train_small
from solaris_udf.vertical_rows import Rows
from solaris_udf.world.parameters import HOUR

WORLDS = ("standard", "hard")
MOVIELENS = "movielens-100k"
TRAINED_DAYS, TRAIN_HOURS, EVAL_HOURS = 6, 36, 24
MOVIELENS_DAYS = 140, 40  # the foundation model's, the small models'; the rest judges
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
MODEL_AGES = (24, 48, 96)  # hours before `start` that training ends
DIMENSIONS = (8, 16, 64, 128)
HALF_LIVES = (6, 12)  # hours after which a vector counts half as much in its user's mean
LEARNING_RATES = (3e-3, 1e-3)
HALF = 0.5
Pair = tuple[Rows, Rows]  # to train on, to evaluate on
Predictions = dict[tuple[str, str], np.ndarray]  # (model, feature set) -> [seeds or 1, rows]


def kept(rows: Rows, draw: np.ndarray, share: float) -> Rows:
    """A random share keeps its pair (draw: each row's own number in [0, 1)); a share includes every smaller one."""
    return rows.without(draw >= share, np.zeros(len(rows), bool))


def each(rows: Pair, change: Callable[[Rows, int], Rows]) -> Pair:
    return change(rows[0], 0), change(rows[1], 1)


@dataclass(frozen=True)
class Bench:
    """One world's log, its foundation models, and the small models' schedule.

    start: microseconds; the foundation model trains before, the small ones from then to split, and are judged after.
    """

    world: str
    log: Interactions
    start: int
    split: int
    plan: Plan
    schedule: Schedule
    cache: Path | None

    def rows(self, age: int = 0, dimension: int = 32) -> tuple[Rows, np.ndarray, ModelSays, np.ndarray]:
        """The small models' rows, their users, what a model says of them that was trained until `age` hours before
        the start, and a random number in [0, 1) a row: those below HALF were bought, and are what user means are of.
        With a cache, a model that is there is not trained again."""
        with tempfile.TemporaryDirectory() as made:
            base = (self.cache or Path(made)) / f"{self.world}-{age}-{dimension}"
            losses = {}
            samples = None
            for rate in LEARNING_RATES:
                folder = base / f"{rate:g}"
                if not (folder / "loss").exists():
                    if samples is None:
                        samples = training_samples(self.log, self.plan.size, self.start - age * HOUR)
                    plan = replace(self.plan, embedding_dim=dimension, learning_rate=rate)
                    trained = train(samples, plan, folder, name="bench")
                    assert trained is not None
                    console.print(
                        f"{self.world}, {dimension} dimensions, {age} h old, learning rate {rate:g}: foundation "
                        f"model of {trained.train_rows:,} rows, best epoch {trained.best_epoch}, validation NE "
                        f"{trained.ne:.4f} (logistic regression on click rates {trained.baseline_ne:.4f})",
                        highlight=False,
                    )
                    (folder / "loss").write_text(repr(trained.log_loss))
                losses[folder] = float((folder / "loss").read_text())
            best = min(losses, key=lambda folder: losses[folder])
            said = model_says(self.log, load_model(best), self.plan.size, self.start)
            draw = np.random.default_rng(0).random(len(said.place))
        return *rows_of(self.log, said, self.start, draw < HALF), said, draw


def evaluate(world: str, seeds: int, quick: bool, sweeps: bool, cache: Path | None) -> list[Figure]:
    """Simulates or fetches, trains, evaluates, prints, and returns the figures with targets."""
    if world == MOVIELENS:
        log, (trained, small) = movielens(PROJECT / ".cache" / "ml-100k"), (24 * days for days in MOVIELENS_DAYS)
    else:
        users, items = (400, 150) if quick else (3000, 800)
        log = Interactions.simulate(world, users, items, 24 * TRAINED_DAYS + TRAIN_HOURS + EVAL_HOURS)
        trained, small = 24 * TRAINED_DAYS, TRAIN_HOURS
    start = log.start + trained * HOUR
    bench = Bench(
        world,
        log,
        start,
        start + small * HOUR,
        Plan(epochs=1 if quick else 4),
        Schedule(epochs=1) if quick else Schedule(),
        cache,
    )
    rows, user, said, draw = bench.rows()
    early = said.time < bench.split
    judge = Judge(rows.label[~early], np.unique(user[~early], return_inverse=True)[1], seeds, {})
    predictions = compare(said, rows, draw, early, judge, bench.schedule)
    if sweeps:
        sweep_means(bench, said, draw, judge, predictions)
        sweep_models(bench, judge, predictions)
    show(world, judge.found)
    return list(judged(world, judge.found))


def predict(name: str, parts: Pair, seeds: int, schedule: Schedule) -> np.ndarray:
    """[seeds, rows evaluated] of small models with one feature set."""
    models = (train_small(parts[0], FEATURE_SETS[name], seed=seed, schedule=schedule) for seed in range(seeds))
    return np.stack([model.predict(parts[1]) for model in models])


@dataclass(frozen=True)
class Judge:
    """Measures predictions on the later rows. label, user [n]; found: what it adds to."""

    label: np.ndarray
    user: np.ndarray
    seeds: int
    found: Found

    def add(self, sweep: str, setting: str, predictions: Predictions, only: str = "") -> None:
        for one in figures(self.label, self.user, predictions, list(range(self.seeds))):
            if one.seed == ALL_SEEDS and only in ("", one.feature_set) and (not only or "transfer" not in one.metric):
                self.found[sweep, setting, one.model, one.feature_set, one.metric] = one

    def add_gain(self, sweep: str, setting: str, before: np.ndarray, made: np.ndarray, name: str) -> None:
        """rll_added: RLL of predictions against others of the same feature set, on the same rows."""
        beside = figures(self.label, self.user, {BASE: before, ("vm", name): made}, list(range(self.seeds)))
        added = next(one for one in beside if (one.feature_set, one.metric, one.seed) == (name, "rll", ALL_SEEDS))
        self.found[sweep, setting, "vm", name, "rll_added"] = replace(added, metric="rll_added")


def sweep_means(bench: Bench, said: ModelSays, draw: np.ndarray, judge: Judge, main: Predictions) -> None:
    """Adds what a decay in the users' means brings: beside the pairs of half of the rows, and where means are all.

    main: the predictions of the main comparison, whose means have none.
    """
    early = said.time < bench.split
    draws = draw[early], draw[~early]
    kinds = {"user_mean": "embeddings", "user_mean_alone": "user_only"}
    for sweep, name in kinds.items():
        judge.add(sweep, "none", {BASE: main[BASE], ("vm", name): main["vm", name]}, name)
    for hours in HALF_LIVES:
        rows, _ = rows_of(bench.log, said, bench.start, draw < HALF, hours)
        parts = each((rows.take(early), rows.take(~early)), lambda part, place: kept(part, draws[place], HALF))
        for sweep, name in kinds.items():
            made = predict(name, parts, judge.seeds, bench.schedule)
            judge.add(sweep, str(hours), {BASE: main[BASE], ("vm", name): made}, name)
            judge.add_gain(sweep, str(hours), main["vm", name], made, name)


def sweep_models(bench: Bench, judge: Judge, main: Predictions) -> None:
    """Adds what embeddings of older models, and of other dimensions, bring: half of the rows keep their pair.

    main: the predictions of the main comparison. Its base holds here too, since it sees no embedding; its embeddings
    are those of the newest model, of 32 dimensions.
    """
    settings = {("fm_age", str(age)): {"age": age} for age in MODEL_AGES}
    settings |= {("dimension", str(size)): {"dimension": size} for size in DIMENSIONS}
    made = dict.fromkeys((("fm_age", "0"), ("dimension", "32")), main["vm", "embeddings"])
    for setting, options in settings.items():
        rows, _, said, draw = bench.rows(**options)
        early = said.time < bench.split
        draws = draw[early], draw[~early]
        full: Pair = rows.take(early), rows.take(~early)
        parts = each(full, lambda part, place, draws=draws: kept(part, draws[place], HALF))
        made[setting] = predict("embeddings", parts, judge.seeds, bench.schedule)
    for (sweep, name), predictions in sorted(made.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        judge.add(sweep, name, {BASE: main[BASE], ("vm", "embeddings"): predictions}, "embeddings")


def compare(
    said: ModelSays, rows: Rows, draw: np.ndarray, early: np.ndarray, judge: Judge, schedule: Schedule
) -> Predictions:
    """Trains every small model, measures it on the later rows, and returns what the main ones predict."""
    full: Pair = rows.take(early), rows.take(~early)
    draws = draw[early], draw[~early]
    half = each(full, lambda part, place: kept(part, draws[place], HALF))
    pairs = each(full, lambda part, _: part.only_tiers([PAIR]))
    half_pairs = each(half, lambda part, _: part.only_tiers([PAIR]))

    def of(name: str, parts: Pair) -> np.ndarray:
        return predict(name, parts, judge.seeds, schedule)

    predictions: Predictions = {
        BASE: of("base", full),
        **{
            ("vm", name): of(name, half)
            for name in ("distillation", "embeddings", "both", "shuffled", "flags_only", "user_only")
        },
        ("vm", "every_pair"): of("embeddings", full),
        FM: said.click[~early][None],
        FRESH: said.fresh[~early][None],
    }
    if said.truth is not None:
        predictions["truth", ""] = said.truth[~early][None]
    judge.add("main", "", predictions)
    for share in SHARES:
        made = of("embeddings", each(pairs, lambda part, place, share=share: kept(part, draws[place], share)))
        judge.add("coverage", f"{share:g}", {BASE: predictions[BASE], ("vm", "embeddings"): made}, "embeddings")
    alone = of("embeddings", half_pairs)
    for setting, made in (("pair", alone), ("pair + user_mean", predictions["vm", "embeddings"])):
        judge.add("tier", setting, {BASE: predictions[BASE], ("vm", "embeddings"): made}, "embeddings")
    judge.add_gain("tier", "pair + user_mean", alone, predictions["vm", "embeddings"], "embeddings")
    made = of("embeddings", each(half, lambda part, _: part.stored_as("int8")))
    judge.add("codec", "int8", {BASE: predictions[BASE], ("vm", "embeddings"): made}, "embeddings")
    return predictions


if __name__ == "__main__":
    options = arguments(
        __doc__,
        world={"choices": [*WORLDS, MOVIELENS], "help": "one log only; without it both simulated worlds"},
        seeds={"type": int, "default": 5, "help": "small models of each kind"},
        sweeps={"action": "store_true", "help": "also the model's age, the dimension, and decay in user means"},
        cache={"type": Path, "help": "folder that keeps the trained foundation models"},
    )
    torch.set_num_threads(1)  # repeatable to the bit
    worlds = [options.world] if options.world else WORLDS[: 1 if options.quick else None]
    seeds = 1 if options.quick else options.seeds
    report(
        "what of the foundation model reaches a small model",
        [figure for world in worlds for figure in evaluate(world, seeds, options.quick, options.sweeps, options.cache)],
        options.json,
    )
