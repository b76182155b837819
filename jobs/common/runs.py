"""A run: one job at one as_of. Gives the job its context, records the outcome in job_runs."""

import importlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import ModuleType

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs import JOBS
from jobs.common.clock import slice_of, ts
from jobs.common.config import Config
from jobs.common.errors import RunFailed, UserError
from jobs.common.tables import Tables, spark_schema
from schemas import TABLES

log = logging.getLogger("solaris")


@dataclass(frozen=True)
class Run:
    """What a job gets: where it runs, its config, its logical time, and its tables."""

    job: str
    spark: SparkSession
    config: Config
    as_of: datetime
    run_id: str

    @property
    def slice(self) -> str:
        return slice_of(self.as_of)

    @property
    def tables(self) -> Tables:
        return Tables(self.spark, self.config.path("tables"))

    def stamp(self, frame: DataFrame) -> DataFrame:
        """Adds slice, as_of and run_id."""
        return frame.withColumns({"slice": F.lit(self.slice), "as_of": ts(self.as_of), "run_id": F.lit(self.run_id)})

    def write(self, frame: DataFrame, table: str) -> int:
        """Replaces this run's slice of a table by frame (without slice, as_of, run_id). Returns the rows written."""
        return self.tables.replace(self.stamp(frame), table, slice=self.slice)

    def reject(self, frame: DataFrame, count: int | None = None) -> int:
        """Replaces this run's rejected rows by frame (reason STRING, row STRING). Returns how many there are.

        Called once a run, also with no rows: a retry that rejects nothing must clear what the first try rejected.
        count: how many rows frame has, where the caller knows; 0 spares the write if no earlier try left any.
        """
        if count == 0:
            of_this_run = (F.col("slice") == self.slice) & (F.col("source") == self.job)
            if self.tables.read("rejected_rows").where(of_this_run).isEmpty():
                return 0
        rows = self.stamp(frame.select("reason", "row")).withColumn("source", F.lit(self.job))
        return self.tables.replace(rows, "rejected_rows", slice=self.slice, source=self.job)

    def check_reject_rate(self, rejected: int, total: int) -> None:
        """Raises RunFailed if too large a part of the rows was rejected. Call before anything is published."""
        quality = self.config.quality
        if total >= quality.min_rows_for_rate and rejected > quality.max_reject_rate * total:
            raise RunFailed(
                f"{self.job} {self.slice}: {rejected} of {total} rows were rejected, more than "
                f"quality.max_reject_rate = {quality.max_reject_rate}; nothing was published; "
                f"see rejected_rows where source = '{self.job}'"
            )


@dataclass(frozen=True)
class Report:
    """What a job did. metrics are the job's own figures, kept in job_runs."""

    rows_in: int = 0
    rows_out: int = 0
    rows_rejected: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A report with its run."""

    run_id: str
    job: str
    slice: str
    seconds: float
    report: Report


def job_module(job: str) -> ModuleType:
    """The module of a job. Raises UserError for an unknown name."""
    if job not in JOBS:
        raise UserError(f"there is no job {job!r}; jobs: {', '.join(JOBS)}")
    return importlib.import_module(f"jobs.{job}")


def execute(job: str, spark: SparkSession, config: Config, as_of: datetime) -> Outcome:
    """Runs one job at one as_of and records it, failed or not. Errors go on to the caller."""
    module = job_module(job)
    run = Run(job, spark, config, as_of, f"{slice_of(as_of)}-{job}-{uuid.uuid4().hex[:8]}")
    started_at, clock = datetime.now(UTC), time.monotonic()
    log.info("%s %s started", job, run.slice)
    try:
        report: Report = module.run(run, config.get(module.Settings))
    except BaseException as error:
        _record(run, "failed", started_at, time.monotonic() - clock, Report(), _one_line(error))
        raise
    seconds = time.monotonic() - clock
    _record(run, "succeeded", started_at, seconds, report, None)
    log.info(
        "%s %s: %s in, %s out, %s rejected, %.1f s",
        job,
        run.slice,
        report.rows_in,
        report.rows_out,
        report.rows_rejected,
        seconds,
    )
    return Outcome(run.run_id, job, run.slice, seconds, report)


def finished_runs(spark: SparkSession, config: Config) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(job, slice) of every run that succeeded, and of those that did so under this very config.

    A resumed series may skip the latter; the former say when a daily job ran last. Bounded by jobs x slices; the
    driver of a series needs the lists.
    """
    rows = (
        Tables(spark, config.path("tables"))
        .read("job_runs")
        .where(F.col("status") == "succeeded")
        .groupBy("job", "slice")
        .agg(F.max(F.col("config_hash") == config.hash).alias("same_config"))
        .collect()
    )
    return {(row.job, row.slice) for row in rows}, {(row.job, row.slice) for row in rows if row.same_config}


def _one_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:500]


def _record(run: Run, status: str, started_at: datetime, seconds: float, report: Report, error: str | None) -> None:
    row = (
        run.run_id,
        run.job,
        run.slice,
        run.as_of,
        status,
        run.config.hash,
        report.rows_in,
        report.rows_out,
        report.rows_rejected,
        started_at,
        seconds,
        error,
        {key: float(value) for key, value in report.metrics.items()},
    )
    try:
        frame = run.spark.createDataFrame([row], spark_schema(TABLES["job_runs"]))
        run.tables.append(frame, "job_runs")
    except Exception as lost:
        # The job's own error matters more than the record of it; without one, a lost record is the error.
        if status == "succeeded":
            raise
        log.error("%s could not be recorded in job_runs: %s", run.run_id, _one_line(lost))
