"""What the embeddings are worth: the pipeline on a simulated platform, then evaluate_uplift on what it served.

Per world (standard, and hard, whose ground truth differs): nine days of 3,000 users and 800 campaigns. The foundation
model trains on the first six days; from then on every job runs each six hours as in production, with a budget of 20% of
the candidates; join_features gives each row what the snapshot live at its time would have served. Small models train on
the first 36 hours of those rows and are judged on the next 24. Everything is computed by the pipeline's own jobs with
conf/uplift.toml, and stands in vm_evaluations below CACHE/WORLD/tables afterwards, with a report. A run that was
stopped goes on where it stopped if --cache names the same folder. --means: also user means in which younger vectors,
or likelier pairs, count more, each carried from aggregate_users on through the jobs that follow, on a copy of the
tables; the rows user_mean have pairs, means and neighbours, user_mean_alone what is known of the user alone. --quick: a
small world, to see that it runs; its figures say nothing.
"""

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from measure import Figure, arguments, report
from pyspark.sql import SparkSession
from uplift_figures import Found, judged, show

from jobs.common.clock import steps
from jobs.common.config import Config, load_config
from jobs.common.console import run_with_progress
from jobs.common.report import write_report
from jobs.common.runs import execute
from jobs.common.series import SERIES, Entry, in_turn
from jobs.common.session import PROJECT, build_session
from jobs.common.tables import Tables
from jobs.common.terminal import console
from solaris_udf.uplift import Figure as Measured

FILE = PROJECT / "conf" / "uplift.toml"
WORLDS = ("standard", "hard")
START = datetime(2026, 1, 1, tzinfo=UTC)
TRAIN_HOURS, EVAL_HOURS = 36, 24
SWEEPS = (
    "evaluate_uplift.coverage_sweep=[0.2, 0.4, 0.6, 0.8, 1.0]",
    "evaluate_uplift.budget_sweep=[0.1, 0.25, 0.5, 1.0]",
    "evaluate_uplift.tier_sweep=true",
    "evaluate_uplift.ttl_sweep=[3, 6, 12]",
    "evaluate_uplift.codec_sweep=true",
)
# What depends on the users' means, and the jobs that make it anew with other ones.
OF_MEANS = (
    *("user_embeddings", "user_sums", "user_neighbors", "user_clusters", "snapshots"),
    *("training_rows", "vm_evaluations", "job_runs"),
)
MEAN_JOBS = in_turn(("aggregate_users", "find_neighbors", "export_snapshot", "join_features"))
MEANS = {
    "half-life of 12 h": "aggregate_users.half_life_hours=12",
    "by probability": "aggregate_users.weight_by_probability=true",
}
MEAN_SWEEPS = {"user_mean": "embeddings", "user_mean_alone": "user_only"}
MEAN_EVALUATION = (
    f"evaluate_uplift.feature_sets={list(MEAN_SWEEPS.values())}",
    "evaluate_uplift.coverage_sweep=[]",
)
SMALL_WORLD = (
    "make_world.users=200",
    "make_world.items=150",
    "make_world.days=4",
    "train_foundation.epochs=1",
    "train_verifier.windows=3",
    "train_verifier.validation_windows=1",
)
SMALL_EVALUATION = (
    "evaluate_uplift.epochs=1",
    "evaluate_uplift.replicates=100",
    "evaluate_uplift.coverage_sweep=[0.5, 1.0]",
)


def prepare(spark: SparkSession, config: Config, days: int, first: datetime, last: datetime) -> None:
    """Makes a world of so many days, then runs every job of every slice from first to last; both resume."""
    run_with_progress(spark, config, [START + timedelta(days=days)], [Entry("make_world")], console)
    series = [entry for entry in SERIES if entry.job != "maintain_tables"]
    series.append(Entry("join_features", after=("ingest_log",)))
    run_with_progress(spark, config, steps(first, last, config.window.hours), series, console)


def measured(spark: SparkSession, config: Config, as_of: datetime) -> Found:
    """The evaluation's figures over all seeds."""
    rows = Tables(spark, config.path("tables")).read_slice("vm_evaluations", as_of).where("seed = -1").collect()
    names = ("model", "feature_set", "seed", "metric", "value", "ci_low", "ci_high", "note")
    return {
        (row.sweep, row.setting, row.model, row.feature_set, row.metric): Measured(*(row[name] for name in names))
        for row in rows
    }


def evaluate_means(spark: SparkSession, root: Path, own: list[str], moments: list[datetime], found: Found) -> None:
    """Adds what the embeddings of an evaluated world below root are worth with other means of its users."""
    every = {"plain": found}
    for name, setting in MEANS.items():
        other = root.with_name(f"{root.name}, {name}")
        if not other.exists():
            making = other.with_name(f".{other.name}")
            shutil.rmtree(making, ignore_errors=True)
            shutil.copytree(root / "tables", making / "tables", ignore=shutil.ignore_patterns(*OF_MEANS))
            shutil.copytree(root / "models", making / "models")
            making.rename(other)
        config = load_config([FILE], [*own, *MEAN_EVALUATION, f"storage.root={other}", setting])
        run_with_progress(spark, config, moments, MEAN_JOBS, console)
        execute("evaluate_uplift", spark, config, moments[-1])
        every[name] = measured(spark, config, moments[-1])
    for sweep, kind in MEAN_SWEEPS.items():
        for name, of_name in every.items():
            main = [(key, row) for key, row in of_name.items() if key[0] == "main" and key[2:4] == ("vm", kind)]
            found.update({(sweep, name, *key[2:]): row for key, row in main})


def evaluate(world: str, cache: Path, seeds: int, quick: bool, means: bool) -> list[Figure]:
    """Prepares a world's tables if they are not there, evaluates, prints, and returns the figures with targets."""
    root = cache / world
    given = [f"storage.root={root}", f"make_world.world={world}", *(SMALL_WORLD if quick else ())]
    config = load_config([FILE], given)
    days, trained, train_hours, eval_hours = (4, 3, 6, 6) if quick else (9, 6, TRAIN_HOURS, EVAL_HOURS)
    first = START + timedelta(days=trained)
    last = first + timedelta(hours=train_hours + eval_hours)
    own = [*given, f"evaluate_uplift.train_hours={train_hours}", f"evaluate_uplift.eval_hours={eval_hours}"]
    own += [f"evaluate_uplift.seeds={seeds}", *(SMALL_EVALUATION if quick else ())]
    spark = build_session(config, "bench uplift")
    try:
        prepare(spark, config, days, first, last)
        evaluating = load_config([FILE], own if quick else [*own, *SWEEPS])
        execute("evaluate_uplift", spark, evaluating, last)
        found = measured(spark, config, last)
        if means:
            evaluate_means(spark, root, own, steps(first, last, config.window.hours), found)
        show(world, found)
        console.print(f"report: {write_report(spark, config, Path(config.path('reports', 'index.html')))}")
    finally:
        spark.stop()
    return list(judged(world, found))


if __name__ == "__main__":
    options = arguments(
        __doc__,
        world={"choices": WORLDS, "help": "one world only"},
        seeds={"type": int, "default": 5, "help": "small models of each kind"},
        means={"action": "store_true", "help": "also other means of the users"},
        cache={"type": Path, "help": "where the worlds' tables stay; none: a temporary folder"},
    )
    worlds = [options.world] if options.world else WORLDS[: 1 if options.quick else None]
    with tempfile.TemporaryDirectory() as temporary:
        figures = [
            figure
            for world in worlds
            for figure in evaluate(
                world,
                options.cache or Path(temporary),
                1 if options.quick else options.seeds,
                options.quick,
                options.means,
            )
        ]
    report("what the embeddings are worth", figures, options.json)
