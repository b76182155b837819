"""Which snapshot was live when, and what it served: shared by everything that replays a log against snapshots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, FloatType, IntegerType, MapType, StringType, StructType

from jobs.common.clock import from_micros, micros, slice_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.log import log_between
from jobs.common.runs import Run
from jobs.common.snapshots import rollbacks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Period:
    """From live_from (microseconds, UTC) until the next period begins, this snapshot answered."""

    live_from: int
    snapshot_id: str
    model_version: str


def live_periods(run: Run, start: datetime, end: datetime) -> list[Period]:
    """The periods of [start, end) in order, as the run at its as_of knows them; the first may have begun before start.

    Where two snapshots go live at the same moment the one of the later slice wins. A rollback begins a period of the
    snapshot that it went back to. One row per export run reaches the driver.
    """
    rows = (
        run.tables.read("snapshots")
        .where(F.col("slice") <= run.slice)
        .select(F.unix_micros("live_from").alias("live_from"), "slice", "snapshot_id", "model_version")
        .collect()
    )
    latest: dict[int, Period] = {}
    for row in sorted(rows, key=lambda row: (row.live_from, row.slice, row.snapshot_id)):
        if row.live_from < micros(end):
            latest[row.live_from] = Period(row.live_from, row.snapshot_id, row.model_version)
    versions = {row.snapshot_id: row.model_version for row in rows}
    for moved_at, name in rollbacks(run.config.path("snapshots")):
        if moved_at < min(end, run.as_of) and name in versions:
            latest[micros(moved_at)] = Period(micros(moved_at), name, versions[name])
    begun = [moment for moment in latest if moment <= micros(start)]
    first = max(begun, default=micros(start))
    return [period for moment, period in sorted(latest.items()) if moment >= first]


def missed_windows(run: Run, table: str, hours: float) -> list[datetime]:
    """Ends of the windows that end in the hours before the run's as_of, had a live snapshot and rows in the log, and
    have no slice in a table, oldest first: what earlier runs should have written."""
    window = timedelta(hours=run.config.window.hours)
    ends = [run.as_of - back * window for back in range(int(timedelta(hours=hours) / window), 0, -1)]
    live = live_periods(run, ends[0] - window, run.as_of) if ends else []
    if not live:
        return []
    there = set(run.tables.slices(table))
    missing = [end for end in ends if micros(end) > live[0].live_from and slice_of(end) not in there]
    if not missing:
        return []
    start = missing[0] - window
    rows = log_between(run.tables, start, missing[-1], run.as_of)
    place = F.floor((F.unix_micros("event_time") - micros(start)) / (window // timedelta(microseconds=1)))
    filled = {row.place for row in rows.select(place.alias("place")).distinct().collect()}  # bounded by hours / window
    return [end for end in missing if (end - window - start) // window in filled]


def period_index(periods: Sequence[Period], time: Column) -> Column:
    """INT: the place in periods of the one live at that time, -1 if there was none. A binary search as CASE WHEN."""
    moment = F.unix_micros(time)

    def search(low: int, high: int) -> Column:
        """Of the answers low-1 .. high-1, the right one."""
        if low == high:
            return F.lit(low - 1)
        middle = (low + high) // 2
        earlier = moment < F.lit(periods[middle].live_from)
        return F.when(earlier, search(low, middle)).otherwise(search(middle + 1, high))

    return search(0, len(periods)).cast("int")


def served(rows: DataFrame, periods: Sequence[Period], config: Config, *, vectors: bool) -> DataFrame:
    """rows (user_id, item_id, event_time, ...) with what the snapshot live at event_time would have served.

    Adds snapshot_id and model_version (null for none), tier, age_seconds (-1 for none) and with vectors also
    similarity, embedding and user_tier, user_age_seconds, user_similarity, user_embedding (float16, null for none).

    A user's rows go to one task, ordered by snapshot: a task has one snapshot in hand at a time and touches only its
    users' pages of it. Raises UserError if the files of a needed snapshot are gone.
    """
    if not periods:
        return rows.withColumns(_nothing(vectors))
    paths = [folder_of(config, period) for period in periods]

    def serve_batches(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        from solaris_udf.served import serve

        return serve(batches, paths, vectors)

    filled, as_before = without_null_lists(rows)
    ordered = (
        filled.withColumn("period", period_index(periods, F.col("event_time")))
        .repartition("user_id")
        .sortWithinPartitions("period", "user_id", "item_id", "event_time")
    )
    schema = StructType(list(ordered.schema.fields))
    for name, kind in _FIELDS if vectors else _FIELDS[:2]:
        schema = schema.add(name, kind)
    answered = as_before(ordered.mapInArrow(serve_batches, schema))

    def of_period(values: Sequence[str]) -> Column:
        return F.when(F.col("period") >= 0, F.element_at(F.array(*map(F.lit, values)), F.col("period") + 1))

    return answered.withColumns(
        {
            "snapshot_id": of_period([period.snapshot_id for period in periods]),
            "model_version": of_period([period.model_version for period in periods]),
        }
    ).drop("period")


def without_null_lists(rows: DataFrame) -> tuple[DataFrame, Callable[[DataFrame], DataFrame]]:
    """rows with empty maps and arrays for null ones, and what puts the nulls back after a way through Python.

    Spark asks an Arrow batch for its size after every row, and a map or array column then goes over all nulls since its
    last value again: a batch of n null labels takes n * n / 2 steps, most of the time of a whole join.
    """
    lists = [field for field in rows.schema.fields if isinstance(field.dataType, ArrayType | MapType)]
    filled = rows
    for field in lists:
        empty = (F.array() if isinstance(field.dataType, ArrayType) else F.create_map()).cast(field.dataType)
        filled = filled.withColumn(f"_no_{field.name}", F.col(field.name).isNull())
        filled = filled.withColumn(field.name, F.coalesce(field.name, empty))

    def as_before(frame: DataFrame) -> DataFrame:
        for field in lists:
            frame = frame.withColumn(field.name, F.when(~F.col(f"_no_{field.name}"), F.col(field.name)))
        return frame.drop(*[f"_no_{field.name}" for field in lists])

    return filled, as_before


_FIELDS: tuple[tuple[str, StringType | IntegerType | FloatType | BinaryType], ...] = (
    ("tier", StringType()),
    ("age_seconds", IntegerType()),
    ("similarity", FloatType()),
    ("embedding", BinaryType()),
    ("user_tier", StringType()),
    ("user_age_seconds", IntegerType()),
    ("user_similarity", FloatType()),
    ("user_embedding", BinaryType()),
)


def _nothing(vectors: bool) -> dict[str, Column]:
    names = ["snapshot_id", "model_version"]
    columns = {name: F.lit(None).cast("string") for name in names} | {"tier": F.lit("none"), "age_seconds": F.lit(-1)}
    if vectors:
        columns |= {
            "similarity": F.lit(0.0).cast("float"),
            "embedding": F.lit(None).cast("binary"),
            "user_tier": F.lit("none"),
            "user_age_seconds": F.lit(-1),
            "user_similarity": F.lit(0.0).cast("float"),
            "user_embedding": F.lit(None).cast("binary"),
        }
    return columns


def folder_of(config: Config, period: Period) -> str:
    """Where a period's snapshot lies. Raises UserError if its files are gone."""
    folder = config.path("snapshots", period.snapshot_id)
    if "://" not in folder and not Path(folder).is_dir():
        raise UserError(
            f"snapshot {period.snapshot_id}, live from {from_micros(period.live_from).isoformat()}, is needed for this "
            f"window and its folder {folder} is gone; export that slice again, or keep snapshots longer"
        )
    return folder
