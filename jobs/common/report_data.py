"""What the report shows, read from the Delta tables. Everything is aggregated in Spark; what comes to the driver is
bounded by slices, tiers, jobs and histogram buckets, never by users, pairs or log rows."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import from_micros, micros, slice_of
from jobs.common.log import latest_build, log_between
from jobs.common.report_map import user_map
from jobs.common.tables import Tables

Rows = list[dict[str, Any]]
TIER_NAMES = ("pair", "user_mean", "neighbor_pair", "neighbor_mean", "cold", "none")
SIMILARITY_STEP = 0.05
REASONS_SHOWN = 200
FAILURES_SHOWN = 20


@dataclass(frozen=True)
class ReportData:
    """The aggregates, each a list of rows in the order in which they are shown; an empty table gives an empty list."""

    coverage: Rows
    """window_start, window_end (datetime), population, tier, rows, mean_age, p90_age (seconds or None)."""
    breakdown: Rows
    """The latest window: surface, segment, population, rows, covered."""
    forecast: Rows
    """Latest and last reconciled slice: slice, bucket, action, pairs, expected_rows, cost."""
    ledger: Rows
    """precompute_ledger, the latest reconciliation of each predicted_at; window_end is when its window ended."""
    window_pairs: Rows
    """The last reconciled window: how many pairs were scored so many rows each; rows, pairs, the most rows first."""
    evaluations: Rows
    """The latest evaluation per dataset and sweep (of fm_age, per age): setting, model, feature_set, metric, value,
    ci_low, ci_high, ..."""
    neighbors: Rows
    """The latest build, one row: slice, users, clusters, mean_neighbors, without."""
    similarities: Rows
    """The latest build: bucket (lower bound of the similarity to the nearest user), users."""
    user_map: Rows
    """A sample of users: x, y, cluster_id, share, users (of the whole build)."""
    neighbor_runs: Rows
    """find_neighbors runs: slice, rows_out, seconds, metrics."""
    snapshots: Rows
    jobs: Rows
    """One row a job: runs, failed, seconds, sums of its rows; rows and metrics of its latest success."""
    failures: Rows
    rejected: Rows
    """source, reason, rows, slices, last_slice."""


def read_report_data(tables: Tables, slices: int) -> ReportData:
    """Reads everything the report shows, over the last `slices` slices (windows) of each table."""
    coverage = _coverage(tables, slices)
    ledger = _ledger(tables, slices)
    readers: dict[str, Callable[[], Rows]] = {
        "breakdown": lambda: _breakdown(tables, coverage),
        "forecast": lambda: _forecast(tables, ledger),
        "window_pairs": lambda: _window_pairs(tables, ledger),
        "evaluations": lambda: _evaluations(tables),
        "neighbors": lambda: _neighbors(tables),
        "similarities": lambda: _similarities(tables),
        "user_map": lambda: user_map(tables),
        "neighbor_runs": lambda: _neighbor_runs(tables, slices),
        "snapshots": lambda: _snapshots(tables, slices),
        "jobs": lambda: _jobs(tables),
        "failures": lambda: _failures(tables),
        "rejected": lambda: _rejected(tables),
    }
    # Each read is small and mostly waits for planning, so a few at once take a fraction of the time.
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = dict(zip(readers, pool.map(_in_spark_thread, readers.values()), strict=True))
    return ReportData(coverage=coverage, ledger=ledger, **found)


def _in_spark_thread(read: Callable[[], Rows]) -> Rows:
    """Runs read in a thread with the caller's Spark properties; its error goes on to the caller."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(read())
        except BaseException as error:
            outcome.append(error)

    thread = InheritableThread(target=call)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    rows: Rows = outcome[0]
    return rows


def _collect(frame: DataFrame, *times: str) -> Rows:
    """The rows as dicts; columns named in times, unix micros, become UTC datetimes; NaN becomes None."""
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    for row in rows:
        for name in times:
            row[name] = None if row[name] is None else from_micros(row[name])
        row.update({name: None for name, value in row.items() if isinstance(value, float) and math.isnan(value)})
    return rows


def _weighted_mean(value: str, weight: str) -> Column:
    """Mean of value weighted by weight over the rows where value is known; null if there is none."""
    known = F.when(F.col(value).isNotNull(), F.col(weight))
    return F.try_divide(F.sum(F.col(value) * F.col(weight)), F.sum(known))


def _latest_audits(tables: Tables) -> DataFrame:
    """Each window as its latest audit saw it."""
    window = Window.partitionBy("window_start", "window_end")
    audits = tables.read("coverage_audit").withColumn("last", F.max("slice").over(window))
    return audits.where(F.col("slice") == F.col("last"))


def _coverage(tables: Tables, windows: int) -> Rows:
    rows = _collect(
        _latest_audits(tables)
        .where((F.col("surface") == "all") & (F.col("segment") == "all"))
        .groupBy(
            F.unix_micros("window_start").alias("window_start"),
            F.unix_micros("window_end").alias("window_end"),
            "population",
            "tier",
        )
        .agg(
            F.sum("rows").alias("rows"),
            _weighted_mean("mean_age_seconds", "rows").alias("mean_age"),
            _weighted_mean("p90_age_seconds", "rows").alias("p90_age"),
        )
        .orderBy(F.desc("window_start"), "population", "tier")
        .limit((windows + 1) * 2 * len(TIER_NAMES)),
        "window_start",
        "window_end",
    )
    kept = sorted({row["window_start"] for row in rows})[-windows:]
    order = {tier: place for place, tier in enumerate(TIER_NAMES)}
    return sorted(
        (row for row in rows if row["window_start"] in kept),
        key=lambda row: (row["window_start"], row["window_end"], row["population"], order[row["tier"]]),
    )


def _breakdown(tables: Tables, coverage: Rows) -> Rows:
    if not coverage:
        return []
    start = max(row["window_start"] for row in coverage)
    return _collect(
        _latest_audits(tables)
        .where(F.unix_micros("window_start") == micros(start))
        .groupBy("surface", "segment", "population")
        .agg(
            F.sum("rows").alias("rows"),
            F.sum(F.when(F.col("tier") != "none", F.col("rows")).otherwise(0)).alias("covered"),
        )
        .orderBy("population", F.col("surface") != "all", "surface", F.col("segment") != "all", "segment")
        .limit(REASONS_SHOWN)
    )


def _ledger(tables: Tables, slices: int) -> Rows:
    latest = Window.partitionBy("predicted_at").orderBy(F.desc("slice"))
    rows = _collect(
        tables.read("precompute_ledger")
        .withColumn("place", F.row_number().over(latest))
        .where("place = 1")
        .withColumns({"predicted_at": F.unix_micros("predicted_at"), "window_end": F.unix_micros("as_of")})
        .drop("place", "slice", "as_of", "run_id")
        .orderBy(F.desc("predicted_at"))
        .limit(slices),
        "predicted_at",
        "window_end",
    )
    return rows[::-1]


def _window_pairs(tables: Tables, ledger: Rows) -> Rows:
    if not ledger:
        return []
    start, end = ledger[-1]["predicted_at"], ledger[-1]["window_end"]
    return _collect(
        log_between(tables, start, end, end)
        .groupBy("user_id", "item_id")
        .agg(F.count("*").alias("rows"))
        .groupBy("rows")
        .agg(F.count("*").alias("pairs"))
        .orderBy(F.desc("rows"))
    )


def _forecast(tables: Tables, ledger: Rows) -> Rows:
    names = {tables.last_slice("score_histogram"), *([slice_of(ledger[-1]["predicted_at"])] if ledger else [])} - {None}
    return (
        _collect(
            tables.read("score_histogram")
            .where(F.col("slice").isin(sorted(str(name) for name in names)))
            .select("slice", "bucket", "action", "pairs", "expected_rows", "cost")
            .orderBy(F.desc("slice"), F.desc("bucket"), "action")
        )
        if names
        else []
    )


def _evaluations(tables: Tables) -> Rows:
    rows = tables.read("vm_evaluations")
    # An age of the model is measured once by each evaluation: its sweep is of many.
    age = F.when(F.col("sweep") == "fm_age", F.col("setting"))
    latest = Window.partitionBy("dataset", "sweep", age)
    key = ("dataset", "sweep", "setting", "model", "feature_set", "metric")
    overall = F.col("seed") == -1
    return _collect(
        rows.withColumn("last", F.max(F.struct("slice", "evaluation_id")).over(latest))
        .where((F.col("slice") == F.col("last.slice")) & (F.col("evaluation_id") == F.col("last.evaluation_id")))
        .groupBy("slice", "evaluation_id", *key)
        .agg(
            F.max(overall).alias("has_overall"),
            F.max(F.when(overall, F.col("value"))).alias("overall"),
            F.max(F.when(overall, F.col("ci_low"))).alias("ci_low"),
            F.max(F.when(overall, F.col("ci_high"))).alias("ci_high"),
            F.avg(F.when(~overall, F.col("value"))).alias("seed_mean"),
            F.count_distinct(F.when(~overall, F.col("seed"))).alias("seeds"),
            F.max("rows").alias("rows"),
            F.max("note").alias("note"),
        )
        # A figure without a row over all seeds is shown as the seeds' mean, without an interval.
        .withColumn("value", F.when(F.col("has_overall"), F.col("overall")).otherwise(F.col("seed_mean")))
        .drop("has_overall", "overall", "seed_mean")
        .orderBy(*key)
    )


def _neighbors(tables: Tables) -> Rows:
    return _collect(
        latest_build(tables.read("user_neighbors"))
        .groupBy(F.col("build").alias("slice"))
        .agg(
            F.count("*").alias("users"),
            F.count_distinct("cluster_id").alias("clusters"),
            F.avg(F.size("neighbors")).alias("mean_neighbors"),
            F.sum((F.size("neighbors") == 0).cast("bigint")).alias("without"),
        )
    )


def _similarities(tables: Tables) -> Rows:
    nearest = F.get("neighbors", F.lit(0))["similarity"].cast("double")
    top = F.lit(1 - SIMILARITY_STEP)
    return _collect(
        latest_build(tables.read("user_neighbors"))
        .where(F.size("neighbors") > 0)
        .withColumn("bucket", F.least(F.round(F.floor(nearest / SIMILARITY_STEP + 1e-6) * SIMILARITY_STEP, 2), top))
        .groupBy("bucket")
        .agg(F.count("*").alias("users"))
        .orderBy("bucket")
    )


def _neighbor_runs(tables: Tables, slices: int) -> Rows:
    return _collect(
        tables.read("job_runs")
        .where((F.col("job") == "find_neighbors") & (F.col("status") == "succeeded"))
        .groupBy("slice")
        .agg(F.max_by(F.struct("rows_out", "seconds", "metrics"), "started_at").alias("last"))
        .select("slice", "last.*")
        .orderBy(F.desc("slice"))
        .limit(slices)
    )[::-1]


def _snapshots(tables: Tables, slices: int) -> Rows:
    return _collect(
        tables.read("snapshots")
        .select(
            "snapshot_id",
            "slice",
            F.unix_micros("as_of").alias("as_of"),
            F.unix_micros("live_from").alias("live_from"),
            "model_version",
            "status",
            "pairs",
            "users_own",
            "users_neighbor",
            F.coalesce("users_cold", F.lit(0)).alias("users_cold"),
            "bytes",
        )
        .orderBy(F.desc("slice"), F.desc("snapshot_id"))
        .limit(slices),
        "as_of",
        "live_from",
    )[::-1]


def _jobs(tables: Tables) -> Rows:
    good = F.col("status") == "succeeded"
    last = F.max_by(F.struct("rows_in", "rows_out", "rows_rejected", "metrics"), F.when(good, F.col("started_at")))
    return _collect(
        tables.read("job_runs")
        .groupBy("job")
        .agg(
            F.count("*").alias("runs"),
            F.sum((~good).cast("bigint")).alias("failed"),
            F.avg(F.when(good, F.col("seconds"))).alias("mean_seconds"),
            F.sum("seconds").alias("total_seconds"),
            F.sum("rows_in").alias("sum_in"),
            F.sum("rows_out").alias("sum_out"),
            F.sum("rows_rejected").alias("sum_rejected"),
            last.alias("last"),
        )
        .select("job", "runs", "failed", "mean_seconds", "total_seconds", "sum_in", "sum_out", "sum_rejected", "last.*")
        .orderBy("job")
    )


def _failures(tables: Tables) -> Rows:
    return _collect(
        tables.read("job_runs")
        .where("status = 'failed'")
        .select("job", "slice", "seconds", "error", F.unix_micros("started_at").alias("started_at"))
        .orderBy(F.desc("started_at"), "job")
        .limit(FAILURES_SHOWN),
        "started_at",
    )


def _rejected(tables: Tables) -> Rows:
    return _collect(
        tables.read("rejected_rows")
        .groupBy("source", "reason")
        .agg(F.count("*").alias("rows"), F.count_distinct("slice").alias("slices"), F.max("slice").alias("last_slice"))
        .orderBy(F.desc("rows"), "source", "reason")
        .limit(REASONS_SHOWN)
    )
