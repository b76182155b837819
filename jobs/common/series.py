"""A series of slices in one session: which jobs are due at which as_of, in order, resumed where it stopped."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Literal

from pyspark.sql import SparkSession

from jobs.common.clock import as_of_of, slice_of
from jobs.common.config import Config
from jobs.common.runs import Outcome, execute

Cadence = Literal["slice", "daily", "once"]


@dataclass(frozen=True)
class Entry:
    """One job of a series: how often it is due, and the jobs whose output of the same slice it needs."""

    job: str
    cadence: Cadence = "slice"
    after: tuple[str, ...] = ()


# What the hourly and the daily DAG do. Jobs that wait for nothing in common run side by side, the first named first.
SERIES: tuple[Entry, ...] = (
    Entry("ingest_log"),
    Entry("update_histories", after=("ingest_log",)),
    Entry("train_foundation", "once", ("update_histories",)),
    # Not beside the other training: torch's random numbers and threads belong to the process.
    Entry("train_verifier", "daily", ("ingest_log", "train_foundation")),
    Entry("predict_pairs", after=("ingest_log", "train_foundation", "train_verifier")),
    Entry("audit_coverage", after=("ingest_log",)),
    Entry("embed_pairs", after=("predict_pairs", "update_histories")),
    Entry("aggregate_users", after=("embed_pairs",)),
    Entry("find_neighbors", after=("aggregate_users",)),
    Entry("export_snapshot", after=("aggregate_users", "find_neighbors", "audit_coverage")),
    Entry("maintain_tables", "daily", ("export_snapshot", "join_features")),
)


def in_turn(jobs: Sequence[str]) -> tuple[Entry, ...]:
    """A series of these jobs, each after those before it."""
    return tuple(Entry(job, after=tuple(jobs[:place])) for place, job in enumerate(jobs))


@dataclass(frozen=True)
class Step:
    """One job at one as_of, and the jobs of the same as_of that it waits for."""

    job: str
    as_of: datetime
    after: tuple[str, ...] = ()


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


def plan(moments: Sequence[datetime], finished: set[tuple[str, str]], series: Sequence[Entry] = SERIES) -> list[Step]:
    """The steps due at the moments, in order. finished: (job, slice) of runs that succeeded before."""
    ran = {entry.job: [as_of_of(name) for done, name in finished if done == entry.job] for entry in series}
    steps = []
    for as_of in moments:
        for entry in series:
            if due(entry.cadence, as_of, ran[entry.job]):
                steps.append(Step(entry.job, as_of, entry.after))
                ran[entry.job].append(as_of)
    return steps


def remaining(steps: Sequence[Step], done: set[tuple[str, str]]) -> list[Step]:
    """The steps without those whose (job, slice) is done."""
    return [step for step in steps if (step.job, slice_of(step.as_of)) not in done]


def ready(waiting: Sequence[Step], running: Sequence[Step]) -> list[Step]:
    """The waiting steps of one slice that none of the unfinished ones holds back."""
    unfinished = {step.job for step in (*waiting, *running)}
    return [step for step in waiting if not unfinished & set(step.after)]


def run_series(
    spark: SparkSession,
    config: Config,
    steps: Sequence[Step],
    on_change: Callable[[Sequence[Step]], None] = lambda _: None,
) -> Iterator[Outcome]:
    """Executes the steps; yields their outcomes as they finish.

    Slices run one after another; within one, up to spark.parallel_jobs steps side by side. on_change is told what is
    running. The first error goes to the caller once what runs beside it has ended, and nothing further is started.
    """
    with ThreadPoolExecutor(config.spark.parallel_jobs, thread_name_prefix="solaris") as pool:
        for _, of_slice in groupby(steps, lambda step: step.as_of):
            waiting = list(of_slice)
            running: dict[Future[Outcome], Step] = {}
            while waiting or running:
                free = config.spark.parallel_jobs - len(running)
                for step in ready(waiting, list(running.values()))[:free]:
                    waiting.remove(step)
                    running[pool.submit(execute, step.job, spark, config, step.as_of)] = step
                on_change(list(running.values()))
                try:
                    finished = wait(running, return_when=FIRST_COMPLETED).done
                except KeyboardInterrupt:
                    spark.sparkContext.cancelAllJobs()
                    raise
                for future in finished:
                    del running[future]
                    yield future.result()
