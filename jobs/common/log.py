"""Reading inputs as a run at as_of could have: the one place that keeps the future out."""

from datetime import datetime, timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.tables import Tables


def log_before(
    tables: Tables, as_of: datetime, hours: float | None = None, read_at: datetime | None = None
) -> DataFrame:
    """ranking_log rows with event_time in [as_of - hours, as_of), or any before as_of, that had arrived by as_of.

    read_at, when given, is the (later) time of the run that reads: a trainer that replays an earlier as_of also sees
    rows that an ingest after as_of brought in, if they had arrived by as_of (a log loaded at once is one late slice).

    The slice filter prunes files: a row's slice is after its event_time and not after the run that may see it.
    """
    rows = tables.read("ranking_log").where(
        (F.col("slice") <= slice_of(read_at or as_of))
        & (F.col("event_time") < ts(as_of))
        & (F.col("arrived_at") <= ts(as_of))
    )
    if hours is not None:
        start = as_of - timedelta(hours=hours)
        rows = rows.where((F.col("slice") > slice_of(start)) & (F.col("event_time") >= ts(start)))
    return rows


def log_between(
    tables: Tables, start: datetime, end: datetime, as_of: datetime, read_at: datetime | None = None
) -> DataFrame:
    """ranking_log rows with event_time in [start, end), as a run at as_of knows them; read_at as in log_before."""
    return log_before(tables, as_of, read_at=read_at).where(
        (F.col("slice") > slice_of(start)) & (F.col("event_time") >= ts(start)) & (F.col("event_time") < ts(end))
    )


def latest_per(rows: DataFrame, *key: str) -> DataFrame:
    """The row of the latest slice per key. The caller has already cut off slices after its as_of."""
    order = Window.partitionBy(*key).orderBy(F.col("slice").desc(), F.col("run_id").desc())
    return rows.withColumn("_place", F.row_number().over(order)).where(F.col("_place") == 1).drop("_place")


def items_at(tables: Tables, as_of: datetime) -> DataFrame:
    """What was known about each item at as_of: one row per item."""
    return latest_per(tables.read("items").where(F.col("slice") <= slice_of(as_of)), "item_id")


def histories_at(tables: Tables, as_of: datetime) -> DataFrame:
    """Each user's history at as_of: one row per user. Reads back to the last checkpoint slice only."""
    rows = tables.read("user_histories").where(F.col("slice") <= slice_of(as_of))
    checkpoint = rows.where("checkpoint").agg(F.max("slice").alias("slice")).first()["slice"]  # type: ignore[index]
    if checkpoint is not None:
        rows = rows.where(F.col("slice") >= checkpoint)
    return latest_per(rows, "user_id")


def latest_build(neighbors: DataFrame) -> DataFrame:
    """One row per user of the latest build among user_neighbors rows, the users who came after it included."""
    newest = neighbors.agg(F.max("build").alias("build"))
    return latest_per(neighbors.join(F.broadcast(newest), "build", "left_semi"), "user_id")


def recent_pair_embeddings(
    tables: Tables, as_of: datetime, hours: float, model_version: str | None = None
) -> DataFrame:
    """Every pair embedding computed in (as_of - hours, as_of], older versions of a pair too."""
    start = as_of - timedelta(hours=hours)
    in_window = (F.col("slice") > slice_of(start)) & (F.col("slice") <= slice_of(as_of))
    rows = tables.read("pair_embeddings").where(in_window)
    return rows if model_version is None else rows.where(F.col("model_version") == model_version)


def fresh_pair_embeddings(tables: Tables, as_of: datetime, hours: float, model_version: str) -> DataFrame:
    """The latest embedding per pair computed in (as_of - hours, as_of], of one model version."""
    return latest_per(recent_pair_embeddings(tables, as_of, hours, model_version), "user_id", "item_id")


def embedded_pairs(tables: Tables, after: datetime, until: datetime) -> DataFrame:
    """user_id, item_id, as_of of what the runs in (after, until] embedded, whatever the model version; no vectors."""
    rows = tables.read("pair_embeddings").where(
        (F.col("slice") > slice_of(after)) & (F.col("slice") <= slice_of(until))
    )
    return rows.select("user_id", "item_id", "as_of")
