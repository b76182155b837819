"""A closed-loop A/B test in the simulated world: the ranker reads the live snapshot in one arm and none in the other.

Trains two small models on the training_rows of [as_of - train_hours, as_of), one with the embeddings and one without.
Takes the simulated users as they were at as_of and runs the window [as_of, as_of + window.hours) once per arm with that
arm's model as the online ranker (predicted click probability times bid), reading the snapshots live at each request's
time. Both arms live through the same future, so users are compared with themselves; a third arm repeats the control in
another future (A/A), which shows what chance does. Writes revenue, clicks, conversions, RLL and coverage per arm, and
the lifts, to vm_evaluations (sweep ab) with intervals by a bootstrap over users. Needs the world of make_world. At most
`users` users take part; their sums are what reaches the driver.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.errors import UserError
from jobs.common.evaluations import Stated, write_figures
from jobs.common.live_snapshots import folder_of, live_periods
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.vm_data import Span, choose_span, load_rows
from jobs.common.vm_rows import Collected, item_counts, states_at
from jobs.common.world_files import world_parameters

if TYPE_CHECKING:
    import pyarrow as pa

    from solaris_udf.closed_loop import Experiment
    from solaris_udf.world.parameters import WorldParameters

CONTROL, TREATMENT, AGAIN = "vm_without_snapshot", "vm_with_snapshot", "vm_without_snapshot_again"
FEATURES = {CONTROL: "base", TREATMENT: "embeddings", AGAIN: "base"}


class Settings(Section):
    """The [simulate_ab] section."""

    section = "simulate_ab"
    train_hours: float = Field(36.0, gt=0, description="Hours of training rows, up to as_of")
    users: int = Field(1000, ge=2, description="Simulated users that take part, the first of the world")
    max_rows: int = Field(200_000, ge=2, description="About how many rows at most train and are held on the driver")
    epochs: int = Field(4, ge=1, description="Most epochs of training")
    batch: int = Field(512, ge=1, description="Rows a training step")
    counter_hours: float = Field(72.0, gt=0, description="The items' counters look back this long")
    seed: int = Field(1, ge=0, description="Of the models and of the future; the A/A arm's future has the next one")
    replicates: int = Field(1000, ge=10, description="Bootstrap draws")


def simulated_world(run: Run) -> "WorldParameters":
    """The simulated world. Raises UserError if there is none, or if it begins after as_of."""
    parameters = world_parameters(run.spark, run.config)
    if parameters is None:
        path = run.config.path("raw", "world", "world.json")
        raise UserError(f"simulate_ab needs the simulated world, {path} and log.dataset=world; run make_world first")
    if parameters.start >= micros(run.as_of):
        raise UserError(f"the simulated world begins after as_of {run.as_of.isoformat()}")
    return parameters


def trained_experiment(run: Run, settings: Settings, found: Collected, span: Span, items_path: Path) -> "Experiment":
    """The arms with their trained models, and everything else that the tasks need."""
    from solaris_udf.closed_loop import Arm, Experiment
    from solaris_udf.vertical_model import FEATURE_SETS, Schedule, train

    schedule = Schedule(epochs=settings.epochs, batch=settings.batch)
    models = {
        name: train(found.rows, FEATURE_SETS[name], seed=settings.seed, schedule=schedule)
        for name in sorted(set(FEATURES.values()))
    }
    end = run.as_of + timedelta(hours=run.config.window.hours)
    periods = live_periods(run, run.as_of, end)
    counts = item_counts(run.tables, [run.as_of], settings.counter_hours).toArrow()  # one row an item of the world
    return Experiment(
        parameters=simulated_world(run),
        start=micros(run.as_of),
        end=micros(end),
        arms=[
            Arm(name, models[kind], kind != "base", settings.seed + (name == AGAIN)) for name, kind in FEATURES.items()
        ],
        base=models["base"],
        items_path=str(items_path),
        paths=[folder_of(run.config, period) for period in periods],
        live_from=[period.live_from for period in periods],
        model_version=span.model_version,
        dim=found.rows.pair.shape[1],
        item_counts={
            item: (shown, clicked)
            for item, shown, clicked in zip(
                *(counts[name].to_pylist() for name in ("item_id", "item_shown", "item_clicked")), strict=True
            )
        },
    )


def users_of(run: Run, count: int) -> DataFrame:
    """(number, requests, shown_rows, clicked_rows) of the first users of the world, as they were at as_of."""
    from solaris_udf.world.ids import to_ids

    def with_ids(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        for batch in batches:
            numbers = batch["id"]
            ids = pa.array(to_ids("user", numbers.to_numpy()))
            yield pa.RecordBatch.from_arrays([numbers, ids], names=["number", "user_id"])

    keys = run.spark.range(count).mapInArrow(with_ids, "number BIGINT, user_id BIGINT")
    at = F.timestamp_micros(F.lit(micros(run.as_of)))
    states = states_at(run.tables, keys.withColumn("at", at), run.as_of, run.as_of)
    return states.select("number", "requests", "shown_rows", "clicked_rows")


def run(run: Run, settings: Settings) -> Report:
    """Trains, plays the window in every arm, and writes this slice's figures of the sweep ab."""
    from jobs.common.item_table import write_item_table
    from solaris_udf.closed_loop import OUTPUT_DDL, play

    parameters = simulated_world(run)
    span = choose_span(run, run.as_of - timedelta(hours=settings.train_hours))
    items_path = Path(write_item_table(run))
    found = load_rows(
        run, span, items_path, max_rows=settings.max_rows, counter_hours=settings.counter_hours, foundation=False
    )
    clicks = int(found.rows.label.sum())
    if not 1 < clicks < len(found.rows) - 1:
        raise UserError(
            f"{len(found.rows)} shown rows with {clicks} clicks are too few to train on; run join_features "
            "for more slices before as_of, or raise simulate_ab.train_hours"
        )
    experiment = trained_experiment(run, settings, found, span, items_path)
    tasks = run.spark.sparkContext.defaultParallelism
    users = users_of(run, min(settings.users, parameters.users)).repartition(tasks, "number")
    played = users.mapInArrow(partial(play, experiment=experiment), OUTPUT_DDL).toArrow()
    rows, shown = figures(played, settings.replicates)
    written = write_figures(run, rows, shown)
    metrics = {f"{figure.metric}_{figure.model}": figure.value for _, _, figure in rows if figure.value is not None}
    return Report(rows_in=len(found.rows), rows_out=written, metrics=metrics)


def figures(played: "pa.Table", replicates: int) -> tuple[list[Stated], int]:
    """(figures of the arms, shown rows of the treatment) from each user's sums per arm."""
    import numpy as np
    import pyarrow.compute as pc

    from solaris_udf.closed_loop import SUMS
    from solaris_udf.metrics import interval, relative_log_loss, resample
    from solaris_udf.uplift import ALL_SEEDS, Figure

    table = played.sort_by("number")
    sums: dict[str, Any] = {}
    for arm in FEATURES:
        own = table.filter(pc.equal(table["arm"], arm))
        sums |= {f"{arm}/{name}": own[name].to_numpy() for name in SUMS}
    drawn = resample(sums, replicates, seed=1)
    sides: list[dict[str, Any]] = [{name: np.float64(value) for name, value in drawn.point.items()}, drawn.draws]
    rows: list[Stated] = []

    def state(arm: str, metric: str, values: list[Any], note: str | None = None) -> None:
        value, low, high = (float(one) if np.isfinite(one) else None for one in (values[0], *interval(values[1])))
        rows.append(("ab", "", Figure(arm, FEATURES[arm], ALL_SEEDS, metric, value, low, high, note)))

    with np.errstate(divide="ignore", invalid="ignore"):
        for arm in FEATURES:
            for metric in ("revenue", "clicks", "conversions"):
                state(arm, metric, [side[f"{arm}/{metric}"] for side in sides])
            state(arm, "coverage", [side[f"{arm}/served"] / side[f"{arm}/scored"] for side in sides])
            state(arm, "rll", [relative_log_loss(side[f"{arm}/loss"], side[f"{arm}/base_loss"]) for side in sides])
            if arm == CONTROL:
                continue
            note = "A/A: the control again in another future; chance only" if arm == AGAIN else None
            for metric in ("revenue", "clicks", "conversions"):
                state(
                    arm,
                    f"{metric}_lift",
                    [100 * (side[f"{arm}/{metric}"] / side[f"{CONTROL}/{metric}"] - 1) for side in sides],
                    note,
                )
    return rows, int(sides[0][f"{TREATMENT}/shown"])


if __name__ == "__main__":
    main("simulate_ab")
