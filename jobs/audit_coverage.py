"""Audits a window that has passed: which rows found an embedding, from which tier, and what the predicted pairs became.

Replays the ranking log of [as_of - window.hours, as_of), as known at as_of, against the snapshot that was live at each
row's time, through the reader that serves online; also earlier windows that no run audited. Writes coverage_audit (per
surface, population, segment and tier) and, for the predict_pairs slice whose window this was, precompute_ledger. Works
from the Delta tables and the snapshots' files alone. A coverage below a configured limit or far below the trailing
week's, or an outcome far below its forecast, fails the run after the audit is written.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import Section
from jobs.common.errors import RunFailed
from jobs.common.live_snapshots import live_periods, missed_windows, served
from jobs.common.log import histories_at, items_at, log_between
from jobs.common.main import main
from jobs.common.runs import Report, Run

GROUP = ("snapshot_id", "surface", "population", "segment")

# What no limit counts as covered: a group's centroid must not hide that the embeddings of its users are gone.
NOT_THEIRS = {"none", "cold"}


class Settings(Section):
    """The [audit_coverage] section."""

    section = "audit_coverage"
    min_coverage: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Least share of scored rows with an embedding, where a snapshot was live; below it the run fails",
    )
    min_pair_coverage: float = Field(0.0, ge=0, le=1, description="The same for rows answered by their own pair")
    max_drop: float = Field(
        1.0, ge=0, le=1, description="Most that the coverage may be below that of the week before, as a share of rows"
    )
    min_outcome: float = Field(
        0.0, ge=0, description="Least covered rows as a multiple of those forecast for the predicted pairs"
    )
    catch_up_hours: float = Field(
        48.0,
        ge=0,
        description="Windows that end in this many hours before as_of and were never audited are audited too",
    )
    segments: bool = Field(True, description="Also count new, regular and hot users apart, and new items")
    hot_rows_a_day: float = Field(300.0, gt=0, description="Scored rows a day, in the window, from which a user is hot")
    new_item_hours: float = Field(24.0, gt=0, description="An item is new for so long after its creation")


# How far back a window's coverage is compared.
WEEK = timedelta(days=7)


def with_segments(rows: DataFrame, known: DataFrame, hot_rows: float, items: DataFrame, new_hours: float) -> DataFrame:
    """Adds segments, an array of one user segment and one item segment.

    user:new (not in known(user_id)), user:hot (at least hot_rows rows here), else user:regular. item:new (created less
    than new_hours before the row, or after it), item:regular, item:unknown without a created_at in items.
    """
    count = F.count(F.lit(1)).over(Window.partitionBy("user_id"))
    seen = known.select("user_id").withColumn("_seen", F.lit(True))
    user = (
        F.when(F.col("_seen").isNull(), "user:new").when(count >= F.lit(hot_rows), "user:hot").otherwise("user:regular")
    )
    age = F.unix_micros("event_time") - F.unix_micros("created_at")
    item = (
        F.when(age.isNull(), "item:unknown")
        .when(age < F.lit(round(new_hours * 3_600_000_000)), "item:new")
        .otherwise("item:regular")
    )
    return (
        rows.join(seen, "user_id", "left")
        .join(items.select("item_id", "created_at"), "item_id", "left")
        .withColumn("segments", F.array(user, item))
        .drop("_seen", "created_at")
    )


def audit(answered: DataFrame, order: Sequence[str], start: datetime, end: datetime) -> DataFrame:
    """Counts answered rows (snapshot_id, surface, shown, segments, tier, age_seconds) per group and tier.

    Each row counts for its surface and for all, as scored and, if shown, as shown, for its segments and for all; shares
    are of the group's rows, so they add up to 1. Cumulative shares go by order, the tiers from the first choice on;
    other tiers come after them, and none last.
    """

    def each(values: Column, name: str) -> Column:
        return F.explode(values).alias(name)

    rows = (
        answered.withColumn("snapshot_id", F.coalesce("snapshot_id", F.lit("none")))
        .select("*", each(F.array_distinct(F.array("surface", F.lit("all"))), "_surface"))
        .select(
            "*",
            each(
                F.when(F.col("shown"), F.array(F.lit("scored"), F.lit("shown"))).otherwise(F.array(F.lit("scored"))),
                "population",
            ),
        )
        .select("*", each(F.concat("segments", F.array(F.lit("all"))), "segment"))
        .drop("surface", "segments")
        .withColumnRenamed("_surface", "surface")
    )
    age = F.when(F.col("tier") != "none", F.col("age_seconds"))
    counted = rows.groupBy(*GROUP, "tier").agg(
        F.count(F.lit(1)).alias("rows"),
        F.avg(age).alias("mean_age_seconds"),
        # Exact: ages are whole seconds within the serving limits, so there are few different ones.
        F.percentile(age, F.lit(0.9)).alias("p90_age_seconds"),
    )
    group = Window.partitionBy(*GROUP)
    total = F.sum("rows").over(group)
    place = F.array_position(F.array(*map(F.lit, order)), F.col("tier"))
    up_to = group.orderBy(F.col("tier") == "none", place == 0, place, "tier")
    return counted.withColumns(
        {
            "share": F.col("rows") / total,
            "cumulative_share": F.sum("rows").over(up_to.rowsBetween(Window.unboundedPreceding, 0)) / total,
            "window_start": ts(start),
            "window_end": ts(end),
        }
    )


def reconcile(candidates: DataFrame, embedded: DataFrame, scored: DataFrame, predicted_at: datetime) -> DataFrame:
    """One ledger row without seconds (none if no pair was selected).

    candidates: the selected pairs of the slice; embedded: the pairs (user_id, item_id) that it embedded; scored: the
    window's rows (user_id, item_id).
    """
    by_pair = scored.groupBy("user_id", "item_id").agg(F.count(F.lit(1)).alias("scored_rows"))
    done = embedded.select("user_id", "item_id").distinct().withColumn("embedded", F.lit(True))
    chosen = (
        candidates.select("user_id", "item_id", "action", "cost", "expected_rows")
        .join(done, ["user_id", "item_id"], "left")
        .join(by_pair, ["user_id", "item_id"], "full")
    )
    reused = F.coalesce(F.col("action") == "reuse", F.lit(False))
    to_compute = F.coalesce(F.col("action") == "compute", F.lit(False))
    computed = to_compute & F.col("embedded").isNotNull()
    hit = computed & F.col("scored_rows").isNotNull()

    def count(condition: Column) -> Column:
        return F.coalesce(F.sum(condition.cast("bigint")), F.lit(0).cast("bigint"))

    def total(value: Column, kind: str) -> Column:
        return F.coalesce(F.sum(value), F.lit(0)).cast(kind)

    return (
        chosen.agg(
            count(reused | to_compute).alias("predicted"),
            count(computed).alias("computed"),
            count(to_compute & ~computed).alias("rejected"),
            count(reused).alias("reused"),
            count(hit).alias("hit"),
            count(computed & ~hit).alias("wasted"),
            total(F.col("scored_rows"), "bigint").alias("scored_rows"),
            total(F.when(computed | reused, F.col("scored_rows")), "bigint").alias("covered_rows"),
            total(F.col("expected_rows"), "double").alias("expected_rows"),
            total(F.when(computed, F.col("cost")), "double").alias("cost"),
        )
        .where("predicted > 0")
        .withColumn("predicted_at", ts(predicted_at))
    )


def run(run: Run, settings: Settings) -> Report:
    """Writes the audits and ledger rows of the window that ends at as_of and of those missed; judges its own."""
    reports: list[Report] = []
    faults: list[str] = []
    for end in (*missed_windows(run, "coverage_audit", settings.catch_up_hours), run.as_of):
        report, faults = audit_window(replace(run, as_of=end), settings, run.as_of)
        reports.append(report)
    if faults:
        raise RunFailed(
            f"audit_coverage {run.slice}: {'; '.join(faults)}; the audit is "
            f"written, see coverage_audit where slice = '{run.slice}'"
        )
    metrics = {**reports[-1].metrics, "windows": float(len(reports))}
    return Report(sum(each.rows_in for each in reports), sum(each.rows_out for each in reports), metrics=metrics)


def audit_window(run: Run, settings: Settings, read_at: datetime) -> tuple[Report, list[str]]:
    """Writes the audit of the window that ends at run.as_of, and its ledger row: of all log rows that had arrived by
    then, also if only a later ingest, up to read_at, brought them in. Returns what the limits find wrong, too."""
    hours = run.config.window.hours
    start = run.as_of - timedelta(hours=hours)
    rows = (
        log_between(run.tables, start, run.as_of, run.as_of, read_at)
        .select("user_id", "item_id", "event_time", "surface", "shown")
        .withColumn("segments", F.array().cast("array<string>"))
    )
    if settings.segments:
        hot = settings.hot_rows_a_day * hours / 24
        items = items_at(run.tables, run.as_of)
        rows = with_segments(rows, histories_at(run.tables, start), hot, items, settings.new_item_hours)
    periods = live_periods(run, start, run.as_of)
    answered = served(rows, periods, run.config, vectors=False).persist()
    try:
        written = run.write(audit(answered, run.config.serving.tiers, start, run.as_of), "coverage_audit")
        outcome = _write_ledger(run, answered, start)
        totals = _totals(run)
    finally:
        answered.unpersist()
    metrics, week = _metrics(totals), _coverage_of_week(run)
    if outcome is not None:
        metrics["outcome_to_forecast"] = outcome
    if week is not None and totals:
        metrics["coverage_week"] = week
    faults = _faults(run, settings, totals, week, outcome)
    return Report(rows_in=sum(row["rows"] for row in totals), rows_out=written, metrics=metrics), faults


def _write_ledger(run: Run, scored: DataFrame, predicted_at: datetime) -> float | None:
    """Writes the ledger row; returns covered rows / those forecast, None without a forecast."""
    candidates = run.tables.read_slice("candidate_pairs", predicted_at)
    if not run.tables.exists("precompute_ledger") and candidates.isEmpty():
        return None
    seconds = (
        run.tables.read("job_runs")
        .where("job = 'embed_pairs' AND status = 'succeeded'")
        .where(F.col("slice") == slice_of(predicted_at))
        .agg(F.max_by("seconds", "started_at").alias("seconds"))
    )
    embedded = run.tables.read_slice("pair_embeddings", predicted_at)
    ledger = reconcile(candidates, embedded, scored, predicted_at).crossJoin(F.broadcast(seconds))
    run.write(ledger, "precompute_ledger")
    written = run.tables.read_slice("precompute_ledger", run.as_of).first()
    return written["covered_rows"] / written["expected_rows"] if written and written["expected_rows"] > 0 else None


def _coverage_of_week(run: Run) -> float | None:
    """Coverage of the scored rows that had a live snapshot, over the windows of the week before; None without any."""
    found = (
        run.tables.read("coverage_audit")
        .where((F.col("slice") > slice_of(run.as_of - WEEK)) & (F.col("slice") < run.slice))
        .where("surface = 'all' AND segment = 'all' AND population = 'scored' AND snapshot_id != 'none'")
        .agg(
            F.sum("rows").alias("rows"), F.sum(F.when(~F.col("tier").isin(*NOT_THEIRS), F.col("rows"))).alias("covered")
        )
        .first()
    )
    return (found["covered"] or 0) / found["rows"] if found and found["rows"] else None


def _totals(run: Run) -> list[dict[str, Any]]:
    """The written audit over all surfaces and users: a few rows a snapshot and tier."""
    rows = (
        run.tables.read_slice("coverage_audit", run.as_of)
        .where("surface = 'all' AND segment = 'all' AND population = 'scored'")
        .select("snapshot_id", "tier", "rows")
        .collect()
    )
    return [row.asDict() for row in rows]


def _share(totals: list[dict[str, Any]], *tiers: str) -> float:
    every = sum(row["rows"] for row in totals)
    return sum(row["rows"] for row in totals if row["tier"] in tiers) / every if every else 0.0


def _metrics(totals: list[dict[str, Any]]) -> dict[str, float]:
    tiers = sorted({row["tier"] for row in totals} - {"none"})
    shares = {f"coverage_{tier}": _share(totals, tier) for tier in tiers}
    return {"rows": sum(row["rows"] for row in totals), "coverage": _share(totals, *tiers), **shares} if totals else {}


def _faults(
    run: Run, settings: Settings, totals: list[dict[str, Any]], week: float | None, outcome: float | None
) -> list[str]:
    """What is past a limit. Only rows that a live snapshot could have answered count, so that a first window passes."""
    judged = [row for row in totals if row["snapshot_id"] != "none"]
    if sum(row["rows"] for row in judged) < run.config.quality.min_rows_for_rate:
        return []
    coverage = _share(judged, *sorted({row["tier"] for row in judged} - NOT_THEIRS))
    found = {"min_coverage": coverage, "min_pair_coverage": _share(judged, "pair")}
    faults = [
        f"coverage of scored rows {share:.4f} is below audit_coverage.{name} = {getattr(settings, name)}"
        for name, share in found.items()
        if share < getattr(settings, name)
    ]
    if week is not None and week - coverage > settings.max_drop:
        faults.append(
            f"coverage of scored rows {coverage:.4f} is {week - coverage:.4f} below that of the week before, more than "
            f"audit_coverage.max_drop = {settings.max_drop}"
        )
    if outcome is not None and outcome < settings.min_outcome:
        faults.append(
            f"covered rows are {outcome:.3f} times those forecast, less than audit_coverage.min_outcome = "
            f"{settings.min_outcome}"
        )
    return faults


if __name__ == "__main__":
    main("audit_coverage")
