"""Audits a window that has passed: which rows found an embedding, from which tier, and what the predicted pairs became.

Replays the ranking log of [as_of - window.hours, as_of), as known at as_of, against the snapshot that was live at each
row's time, through the reader that serves online. Writes coverage_audit (per surface, population, user segment and
tier) and, for the predict_pairs slice whose window this was, precompute_ledger. Works from the Delta tables and the
snapshots' files alone. A coverage below a configured limit fails the run after the audit is written.
"""

from datetime import datetime, timedelta
from typing import Any

from pydantic import Field
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import Section
from jobs.common.errors import RunFailed
from jobs.common.live_snapshots import live_periods, served
from jobs.common.log import histories_at, log_between
from jobs.common.main import main
from jobs.common.runs import Report, Run

GROUP = ("snapshot_id", "surface", "population", "segment")


class Settings(Section):
    """The [audit_coverage] section."""

    section = "audit_coverage"
    min_coverage: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Least share of scored rows with any embedding, where a snapshot was live; below it the run fails",
    )
    min_pair_coverage: float = Field(0.0, ge=0, le=1, description="The same for rows answered by their own pair")
    segments: bool = Field(True, description="Also count new, regular and hot users apart")
    hot_rows_a_day: float = Field(300.0, gt=0, description="Scored rows a day, in the window, from which a user is hot")


def with_segment(rows: DataFrame, known: DataFrame, hot_rows: float) -> DataFrame:
    """Adds segment: user:new (not in known(user_id)), user:hot (at least hot_rows rows here), else user:regular."""
    count = F.count(F.lit(1)).over(Window.partitionBy("user_id"))
    seen = known.select("user_id").withColumn("_seen", F.lit(True))
    segment = (
        F.when(F.col("_seen").isNull(), "user:new").when(count >= F.lit(hot_rows), "user:hot").otherwise("user:regular")
    )
    return rows.join(seen, "user_id", "left").withColumn("segment", segment).drop("_seen")


def audit(answered: DataFrame, start: datetime, end: datetime) -> DataFrame:
    """Counts answered rows (snapshot_id, surface, shown, segment, tier, age_seconds) per group and tier.

    Each row counts for its surface and for all, as scored and, if shown, as shown, for its segment and for all; shares
    are of the group's rows, so they add up to 1.
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
        .select("*", each(F.array_distinct(F.array("segment", F.lit("all"))), "_segment"))
        .drop("surface", "segment")
        .withColumnsRenamed({"_surface": "surface", "_segment": "segment"})
    )
    age = F.when(F.col("tier") != "none", F.col("age_seconds"))
    counted = rows.groupBy(*GROUP, "tier").agg(
        F.count(F.lit(1)).alias("rows"),
        F.avg(age).alias("mean_age_seconds"),
        # Exact: ages are whole seconds within the serving limits, so there are few different ones.
        F.percentile(age, F.lit(0.9)).alias("p90_age_seconds"),
    )
    total = F.sum("rows").over(Window.partitionBy(*GROUP))
    return counted.withColumns(
        {
            "share": F.col("rows") / total,
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
    """Writes the audit of the window that ends at as_of, and its ledger row."""
    hours = run.config.window.hours
    start = run.as_of - timedelta(hours=hours)
    rows = (
        log_between(run.tables, start, run.as_of, run.as_of)
        .select("user_id", "item_id", "event_time", "surface", "shown")
        .withColumn("segment", F.lit("all"))
    )
    if settings.segments:
        rows = with_segment(rows, histories_at(run.tables, start), settings.hot_rows_a_day * hours / 24)
    periods = live_periods(run.tables, start, run.as_of, run.as_of)
    answered = served(rows, periods, run.config, vectors=False).persist()
    try:
        written = run.write(audit(answered, start, run.as_of), "coverage_audit")
        _write_ledger(run, answered, start)
        totals = _totals(run)
    finally:
        answered.unpersist()
    metrics = _metrics(totals)
    _check(run, settings, totals)
    return Report(rows_in=sum(row["rows"] for row in totals), rows_out=written, metrics=metrics)


def _write_ledger(run: Run, scored: DataFrame, predicted_at: datetime) -> None:
    candidates = run.tables.read_slice("candidate_pairs", predicted_at)
    if not run.tables.exists("precompute_ledger") and candidates.isEmpty():
        return
    seconds = (
        run.tables.read("job_runs")
        .where("job = 'embed_pairs' AND status = 'succeeded'")
        .where(F.col("slice") == slice_of(predicted_at))
        .agg(F.max_by("seconds", "started_at").alias("seconds"))
    )
    embedded = run.tables.read_slice("pair_embeddings", predicted_at)
    ledger = reconcile(candidates, embedded, scored, predicted_at).crossJoin(F.broadcast(seconds))
    run.write(ledger, "precompute_ledger")


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


def _check(run: Run, settings: Settings, totals: list[dict[str, Any]]) -> None:
    """Judges only rows that a live snapshot could have answered, so that a first window passes."""
    judged = [row for row in totals if row["snapshot_id"] != "none"]
    if sum(row["rows"] for row in judged) < run.config.quality.min_rows_for_rate:
        return
    every = sorted({row["tier"] for row in judged} - {"none"})
    found = {"min_coverage": _share(judged, *every), "min_pair_coverage": _share(judged, "pair")}
    faults = [
        f"{share:.4f} is below audit_coverage.{name} = {getattr(settings, name)}"
        for name, share in found.items()
        if share < getattr(settings, name)
    ]
    if faults:
        raise RunFailed(
            f"audit_coverage {run.slice}: coverage of scored rows {' and '.join(faults)}; the audit is "
            f"written, see coverage_audit where slice = '{run.slice}'"
        )


if __name__ == "__main__":
    main("audit_coverage")
