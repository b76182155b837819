"""Joins a window of the ranking log with the snapshots that were live at each row's time: the VM's training rows.

Reads ranking_log rows with event_time in [as_of - window.hours, as_of) as known at as_of, label_events that had arrived
by then, `snapshots` and the snapshots' files through the same reader that serves online. Writes training_rows: per row
the vector, tier, age and flags that a lookup at its time would have returned, never a later one. Earlier windows that
it never joined are joined too, each as known at its own end and into its own slice. Where the log holds the vectors
that the online model read, they are compared with those, and the rate of mismatches is reported: training on what was
not served teaches a model another world.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import Section
from jobs.common.errors import RunFailed
from jobs.common.live_snapshots import live_periods, missed_windows, served
from jobs.common.log import log_between
from jobs.common.main import main
from jobs.common.runs import Report, Run

LOG_COLUMNS = ("request_id", "event_time", "user_id", "item_id", "surface", "position", "shown", "clicked", "labels")


class Settings(Section):
    """The [join_features] section."""

    section = "join_features"
    catch_up_hours: float = Field(
        48.0, ge=0, description="Windows that end in this many hours before as_of and were never joined are joined too"
    )
    max_mismatch_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Rows with another vector than the one logged online / rows with one, past which the run fails",
    )


def late_labels(events: DataFrame) -> DataFrame:
    """(request_id, item_id, late MAP<STRING, DOUBLE>): per label the value that happened last."""
    order = F.struct("occurred_at", "arrived_at", "value")
    last = events.groupBy("request_id", "item_id", "label").agg(F.max_by("value", order).alias("value"))
    entries = F.sort_array(F.collect_list(F.struct("label", "value")))
    return last.groupBy("request_id", "item_id").agg(F.map_from_entries(entries).alias("late"))


def with_late_labels(rows: DataFrame, events: DataFrame) -> DataFrame:
    """rows with the late labels merged into `labels`; a late value replaces one that came with the row."""
    late = F.col("late")
    kept = F.map_filter(
        F.coalesce("labels", F.create_map().cast("map<string,double>")), lambda name, _: ~F.map_contains_key(late, name)
    )
    merged = F.when(late.isNull(), F.col("labels")).otherwise(F.map_concat(kept, late))
    return rows.join(late_labels(events), ["request_id", "item_id"], "left").withColumn("labels", merged).drop("late")


def consistency(rows: DataFrame, logged: DataFrame) -> DataFrame:
    """One row: logged, how many training rows have a logged vector, and mismatched, how many have another one.

    rows: request_id, item_id, embedding (null for none). logged: request_id, item_id, served_embedding (empty for
    none). To the bit: both are float16 of one stored vector.
    """
    differs = F.coalesce("embedding", F.lit(b"")) != F.col("served_embedding")
    return rows.join(logged, ["request_id", "item_id"]).agg(
        F.count(F.lit(1)).alias("logged"), F.count_if(differs).alias("mismatched")
    )


def run(run: Run, settings: Settings) -> Report:
    """Writes the training rows of the window that ends at as_of, and of those that were missed."""
    missed = missed_windows(run, "training_rows", settings.catch_up_hours)
    reports = [join_window(replace(run, as_of=end), settings, run.as_of) for end in (*missed, run.as_of)]
    rows = sum(report.rows_out for report in reports)
    return Report(rows, rows, metrics={**reports[-1].metrics, "windows": float(len(reports))})


def join_window(run: Run, settings: Settings, read_at: datetime) -> Report:
    """Writes the training rows of the window that ends at run.as_of: of all that had arrived by then, also if only a
    later ingest, up to read_at, brought it in."""
    start = run.as_of - timedelta(hours=run.config.window.hours)
    log = log_between(run.tables, start, run.as_of, run.as_of, read_at)
    rows = log.select(*LOG_COLUMNS)
    if run.tables.exists("label_events"):
        events = run.tables.read("label_events").where(
            (F.col("slice") > slice_of(start))
            & (F.col("slice") <= slice_of(read_at))
            & (F.col("arrived_at") <= ts(run.as_of))
        )
        rows = with_late_labels(rows, events)
    periods = live_periods(run, start, run.as_of)
    written = run.write(served(rows, periods, run.config, vectors=True), "training_rows")
    metrics = {"snapshots": float(len(periods))}
    logged = log.where(F.col("served_embedding").isNotNull()).select("request_id", "item_id", "served_embedding")
    found = consistency(run.tables.read_slice("training_rows", run.as_of), logged).first()
    if found and found["logged"]:
        rate = found["mismatched"] / found["logged"]
        metrics |= {"logged_vectors": found["logged"], "mismatch_rate": rate}
        if rate > settings.max_mismatch_rate:
            raise RunFailed(
                f"join_features {run.slice}: {found['mismatched']} of {found['logged']} rows have another vector than "
                f"the one logged online, {rate:.4f}, above join_features.max_mismatch_rate = "
                f"{settings.max_mismatch_rate}; the rows are written, docs/evaluation.md has a query that shows them"
            )
    return Report(rows_in=written, rows_out=written, metrics=metrics)


if __name__ == "__main__":
    main("join_features")
