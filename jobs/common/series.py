"""A series of slices in one session: which jobs are due at which as_of, in order, resumed where it stopped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pyspark.sql import SparkSession

from jobs.common.clock import as_of_of, slice_of
from jobs.common.config import Config
from jobs.common.runs import Outcome, execute

Cadence = Literal["slice", "daily", "once"]

# What the hourly and the daily DAG do, in the order in which one slice needs it.
SERIES: tuple[tuple[str, Cadence], ...] = (
    ("ingest_log", "slice"),
    ("audit_coverage", "slice"),
    ("update_histories", "slice"),
    ("train_foundation", "once"),
    ("train_verifier", "daily"),
    ("predict_pairs", "slice"),
    ("embed_pairs", "slice"),
    ("aggregate_users", "slice"),
    ("find_neighbors", "daily"),
    ("export_snapshot", "slice"),
    ("maintain_tables", "daily"),
)


@dataclass(frozen=True)
class Step:
    """One job at one as_of."""

    job: str
    as_of: datetime


def due(cadence: Cadence, as_of: datetime, ran_at: Sequence[datetime]) -> bool:
    """Whether a job of that cadence is due at as_of, given when it ran before in logical time.

    Runs at as_of itself do not count, so a plan made again after a kill names the same steps.
    """
    earlier = [moment for moment in ran_at if moment < as_of]
    if cadence == "slice":
        return True
    if cadence == "once":
        return not earlier
    return not earlier or as_of - max(earlier) >= timedelta(hours=24)


def plan(
    moments: Sequence[datetime],
    finished: set[tuple[str, str]],
    series: Sequence[tuple[str, Cadence]] = SERIES,
) -> list[Step]:
    """The steps due at the moments, in order. finished: (job, slice) of runs that succeeded before."""
    ran = {job: [as_of_of(name) for done, name in finished if done == job] for job, _ in series}
    steps = []
    for as_of in moments:
        for job, cadence in series:
            if due(cadence, as_of, ran[job]):
                steps.append(Step(job, as_of))
                ran[job].append(as_of)
    return steps


def run_series(
    spark: SparkSession,
    config: Config,
    steps: Sequence[Step],
    skip: set[tuple[str, str]],
    on_step: Callable[[int, Step, Outcome | None], None] = lambda *_: None,
) -> Iterator[Outcome]:
    """Executes the steps in order, leaving out (job, slice) in skip. The first error ends it and goes to the caller."""
    for number, step in enumerate(steps):
        if (step.job, slice_of(step.as_of)) in skip:
            on_step(number, step, None)
            continue
        outcome = execute(step.job, spark, config, step.as_of)
        on_step(number, step, outcome)
        yield outcome
