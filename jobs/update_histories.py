"""Brings each active user's history up to date: the last shown and clicked events, and counters.

Reads the ranking_log rows that became visible since the previous user_histories slice (all of them at first), which are
exactly those of the log's slices in between, and merges them with each user's state before. Writes one row per active
user; a checkpoint slice (the first, then one every `checkpoint_hours`) holds every user. The result is what a
computation over the whole log gives: events are ordered by (event_time, item_id, clicked), all of which a history
stores, so an event that comes in late takes the place it would have had.
"""

from datetime import datetime, timedelta

from pydantic import Field
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import as_of_of, slice_of
from jobs.common.config import Section
from jobs.common.log import histories_at
from jobs.common.main import main
from jobs.common.runs import Report, Run

SHOWN = ("event_time", "item_id", "clicked")
CLICKED = ("event_time", "item_id")
COUNTERS = ("requests", "scored_rows", "shown_rows", "clicked_rows")


class Settings(Section):
    """The [update_histories] section."""

    section = "update_histories"
    shown_events: int = Field(50, ge=1, description="How many of the last shown events a history keeps")
    clicked_events: int = Field(50, ge=1, description="How many of the last clicked events a history keeps")
    checkpoint_hours: float = Field(24.0, gt=0, description="A slice with every user is written this often")
    request_days: float = Field(
        7.0,
        ge=0,
        description="How far back the other rows of a request are looked for, so that a "
        "request whose rows come in two slices counts once; 0: through the whole log",
    )
    rebuild: bool = Field(False, description="Compute from the whole log instead of from the previous slice")


def recent_activity(rows: DataFrame, earlier: DataFrame, shown_events: int, clicked_events: int) -> DataFrame:
    """Per user of rows: its last shown and clicked events and its counters.

    rows: ranking_log rows. earlier: request_id, user_id of requests that are counted already.
    Columns: user_id, shown, clicked (arrays with event_time first, in order), COUNTERS, last_event_time.
    """
    known = earlier.select("user_id", "request_id").distinct().withColumn("_counted", F.lit(True))
    rows = rows.select("user_id", "request_id", *CLICKED, "shown", "clicked").join(
        known, on=["user_id", "request_id"], how="left"
    )
    request = Window.partitionBy("user_id", "request_id").orderBy("event_time", "item_id")
    latest = (
        Window.partitionBy("user_id")
        .orderBy(
            F.col("event_time").desc(), F.col("item_id").desc(), F.col("clicked").desc(), F.col("request_id").desc()
        )
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    rows = rows.withColumn("_first", F.col("_counted").isNull() & (F.row_number().over(request) == 1)).withColumns(
        {
            "_shown_place": F.count_if("shown").over(latest),
            "_clicked_place": F.count_if("clicked").over(latest),
        }
    )
    # The windows have already cut each list, so that a very active user's lists stay short.
    shown = F.when(F.col("shown") & (F.col("_shown_place") <= shown_events), F.struct(*SHOWN))
    clicked = F.when(F.col("clicked") & (F.col("_clicked_place") <= clicked_events), F.struct(*CLICKED))
    return rows.groupBy("user_id").agg(
        F.sort_array(F.collect_list(shown)).alias("shown"),
        F.sort_array(F.collect_list(clicked)).alias("clicked"),
        F.count_if("_first").alias("requests"),
        F.count(F.lit(1)).alias("scored_rows"),
        F.count_if("shown").alias("shown_rows"),
        F.count_if("clicked").alias("clicked_rows"),
        F.max("event_time").alias("last_event_time"),
    )


def merge(
    previous: DataFrame | None, activity: DataFrame, shown_events: int, clicked_events: int, everyone: bool
) -> DataFrame:
    """The new rows of user_histories: of the active users, or of everyone that is known.

    previous: user_histories rows, one a user, before this slice; activity: as recent_activity gives it.
    """
    if previous is None:
        merged = activity
    else:
        before = previous.select(
            "user_id",
            _fields("shown", SHOWN).alias("_shown"),
            _fields("clicked", CLICKED).alias("_clicked"),
            *[F.col(name).alias(f"_{name}") for name in (*COUNTERS, "last_event_time")],
        )
        merged = activity.join(before, on="user_id", how="full" if everyone else "left").select(
            "user_id",
            _last("shown", shown_events).alias("shown"),
            _last("clicked", clicked_events).alias("clicked"),
            *[(F.coalesce(name, F.lit(0)) + F.coalesce(f"_{name}", F.lit(0))).alias(name) for name in COUNTERS],
            F.greatest("last_event_time", "_last_event_time").alias("last_event_time"),
        )
    return merged.select(
        "user_id",
        _fields("shown", ("item_id", "event_time", "clicked")).alias("shown"),
        _fields("clicked", ("item_id", "event_time")).alias("clicked"),
        *COUNTERS,
        "last_event_time",
        F.lit(everyone).alias("checkpoint"),
    )


def needs_checkpoint(as_of: datetime, last: str | None, every: timedelta) -> bool:
    """Whether the slice at as_of is to hold every user. last: the latest checkpoint slice before it."""
    return last is None or as_of - as_of_of(last) >= every


def run(run: Run, settings: Settings) -> Report:
    """Loads the new rows and the state before, merges, saves."""
    log = run.tables.read("ranking_log").where(F.col("slice") <= run.slice)
    previous = None if settings.rebuild else run.tables.last_slice("user_histories", before=run.as_of)
    state, checkpoint = None, True
    rows, earlier = log, log.where(F.lit(False))
    if previous is not None:
        histories = run.tables.read("user_histories").where(F.col("slice") <= previous)
        last = histories.where("checkpoint").agg(F.max("slice").alias("slice")).first()["slice"]  # type: ignore[index]
        checkpoint = needs_checkpoint(run.as_of, last, timedelta(hours=settings.checkpoint_hours))
        state = histories_at(run.tables, as_of_of(previous))
        rows, earlier = log.where(F.col("slice") > previous), log.where(F.col("slice") <= previous)
        if settings.request_days:
            since = slice_of(as_of_of(previous) - timedelta(days=settings.request_days))
            earlier = earlier.where(F.col("slice") > since)
    activity = recent_activity(rows, earlier, settings.shown_events, settings.clicked_events).persist()
    try:
        total = activity.agg(F.sum("scored_rows").alias("rows"), F.count(F.lit(1)).alias("users")).first()
        assert total is not None
        histories = merge(state, activity, settings.shown_events, settings.clicked_events, checkpoint)
        nothing = not total.users and (state is None or not checkpoint)
        empty = nothing and run.tables.read_slice("user_histories", run.as_of).isEmpty()
        written = 0 if empty else run.write(histories, "user_histories")
    finally:
        activity.unpersist()
    return Report(total.rows or 0, written, 0, {"active_users": total.users, "checkpoint": float(checkpoint)})


def _fields(array: str, names: tuple[str, ...]) -> Column:
    """The array with each struct's fields in that order."""
    return F.transform(array, lambda event: F.struct(*[event[name].alias(name) for name in names]))


def _last(name: str, count: int) -> Column:
    """The last of the old and new events together, oldest first."""
    nothing = F.array()
    both = F.sort_array(F.concat(F.coalesce(F.col(name), nothing), F.coalesce(F.col(f"_{name}"), nothing)))
    return F.slice(both, F.greatest(F.size(both) - F.lit(count), F.lit(0)) + 1, F.lit(count))


if __name__ == "__main__":
    main("update_histories")
