"""Joins a window of the ranking log with the snapshots that were live at each row's time: the VM's training rows.

Reads ranking_log rows with event_time in [as_of - window.hours, as_of) as known at as_of, label_events that had arrived
by then, `snapshots` and the snapshots' files through the same reader that serves online. Writes training_rows: per row
the vector, tier, age and flags that a lookup at its time would have returned, never a later one.
"""

from datetime import timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import Section
from jobs.common.live_snapshots import live_periods, served
from jobs.common.log import log_between
from jobs.common.main import main
from jobs.common.runs import Report, Run

LOG_COLUMNS = ("request_id", "event_time", "user_id", "item_id", "surface", "position", "shown", "clicked", "labels")


class Settings(Section):
    """The [join_features] section."""

    section = "join_features"


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


def run(run: Run, settings: Settings) -> Report:
    """Writes the training rows of the window that ends at as_of."""
    start = run.as_of - timedelta(hours=run.config.window.hours)
    rows = log_between(run.tables, start, run.as_of, run.as_of).select(*LOG_COLUMNS)
    if run.tables.exists("label_events"):
        events = run.tables.read("label_events").where(
            (F.col("slice") > slice_of(start)) & (F.col("slice") <= run.slice) & (F.col("arrived_at") <= ts(run.as_of))
        )
        rows = with_late_labels(rows, events)
    periods = live_periods(run.tables, start, run.as_of, run.as_of)
    written = run.write(served(rows, periods, run.config, vectors=True), "training_rows")
    return Report(rows_in=written, rows_out=written, metrics={"snapshots": len(periods)})


if __name__ == "__main__":
    main("join_features")
