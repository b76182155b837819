"""Simulates an ad platform and writes its raw log: a test bed whose true probabilities are known.

The world ends at --as-of (excluded) and begins `days` before. Writes below STORAGE.ROOT/raw/world, replacing what is
there: log/ (scored rows, with late and duplicate rows and rows from the future), items/, label_events/ (conversions,
reported late), truth/ (every row's true probabilities, for evaluation only) and world.json. Deterministic in the
settings and --as-of, whatever the partitioning. docs/world.md has the rules.
"""

from datetime import timedelta
from typing import Literal

from pydantic import Field
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.errors import RunFailed
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.world_files import file_system
from solaris_udf.world.parameters import MAX_DAYS, MAX_USERS, SIZES, WorldParameters

USERS_PER_TASK = 1_000


class Settings(Section):
    """The [make_world] section."""

    section = "make_world"
    world: Literal["standard", "hard"] = Field("standard", description="Rules; hard: weaker, faster tastes, CTR 2%")
    size: Literal["tiny", "demo"] = Field("demo", description="Preset of users, items and days")
    users: int | None = Field(None, ge=1, le=MAX_USERS, description="Users, instead of the preset's")
    items: int | None = Field(None, ge=1, description="Items that run at any one time, instead of the preset's")
    days: int | None = Field(None, ge=1, le=MAX_DAYS, description="Days up to --as-of, instead of the preset's")
    seed: int = Field(1, ge=0, lt=2**63, description="Another seed, another world")

    def days_or_preset(self) -> int:
        return self.days if self.days is not None else SIZES[self.size].days

    def parameters(self, start: int) -> WorldParameters:
        """The world that begins at `start` (microseconds UTC)."""
        preset = SIZES[self.size]
        return WorldParameters(
            world=self.world,
            seed=self.seed,
            start=start,
            users=self.users if self.users is not None else preset.users,
            items=self.items if self.items is not None else preset.items,
        )


def simulated_rows(spark: SparkSession, parameters: WorldParameters, end: int) -> DataFrame:
    """Every row of the world until `end`, with its truth, conversion and kind (0 original, 1 duplicate, 2 future)."""
    from solaris_udf.world.generate import log_generator
    from solaris_udf.world.log_rows import LOG_SCHEMA

    tasks = min(parameters.users, max(spark.sparkContext.defaultParallelism, -(-parameters.users // USERS_PER_TASK)))
    numbers = spark.range(0, parameters.users, 1, tasks)
    return numbers.mapInArrow(log_generator(parameters, end), from_arrow_schema(LOG_SCHEMA))


def items(spark: SparkSession, parameters: WorldParameters, end: int) -> DataFrame:
    """Every campaign that starts before `end`."""
    from solaris_udf.world.generate import item_generator
    from solaris_udf.world.log_rows import ITEM_SCHEMA

    return spark.range(0, 1, 1, 1).mapInArrow(item_generator(parameters, end), from_arrow_schema(ITEM_SCHEMA))


def log(rows: DataFrame) -> DataFrame:
    """The raw log. Each file is ordered by arrival, so that a reader of one window skips most of it."""
    return rows.select(
        "request_id",
        "event_time",
        "arrived_at",
        "user_id",
        "item_id",
        "surface",
        "position",
        "shown",
        "clicked",
    ).sortWithinPartitions("arrived_at", "request_id", "item_id")


def label_events(rows: DataFrame) -> DataFrame:
    """The conversions."""
    return rows.where(F.col("converted_at").isNotNull()).select(
        "request_id",
        "item_id",
        F.lit("conversion").alias("label"),
        F.col("converted_at").alias("occurred_at"),
        F.col("conversion_arrived_at").alias("arrived_at"),
        F.lit(1.0).alias("value"),
    )


def truth(rows: DataFrame) -> DataFrame:
    """The true probabilities: of a click if shown, of a conversion if clicked."""
    return rows.where(F.col("kind") == 0).select("request_id", "item_id", "click_probability", "conversion_probability")


def figures(rows: DataFrame) -> DataFrame:
    """One row of counts and rates. truth_ne: the normalized entropy that the true probabilities reach on shown rows."""
    shown = (F.col("kind") == 0) & F.col("shown")
    chance = F.col("click_probability")

    def count(condition: Column) -> Column:
        return F.sum(condition.cast("long"))

    ctr, loss = F.col("clicks") / F.col("shown"), F.col("loss") / F.col("shown")
    entropy = -(ctr * F.log(ctr) + (1 - ctr) * F.log(1 - ctr))
    return (
        rows.agg(
            F.count(F.lit(1)).alias("rows"),
            count(shown).alias("shown"),
            count(shown & F.col("clicked")).alias("clicks"),
            count(F.col("converted_at").isNotNull()).alias("conversions"),
            count(F.col("late")).alias("late"),
            count(F.col("kind") == 1).alias("duplicates"),
            count(F.col("kind") == 2).alias("future"),
            F.sum(F.when(shown, -F.log(F.when(F.col("clicked"), chance).otherwise(1 - chance)))).alias("loss"),
        )
        .withColumns({"ctr": ctr, "truth_ne": F.when(entropy > 0, loss / entropy)})
        .drop("loss")
    )


def run(run: Run, settings: Settings) -> Report:
    """Generates once, writes to a folder of the run's own, then swaps the folders: readers see one world whole."""
    start, end = micros(run.as_of - timedelta(days=settings.days_or_preset())), micros(run.as_of)
    parameters = settings.parameters(start)
    target, staging = run.config.path("raw", "world"), run.config.path("raw", f".world-{run.run_id}")
    rows = simulated_rows(run.spark, parameters, end).persist()
    try:
        log(rows).write.parquet(f"{staging}/log")
        label_events(rows).coalesce(_files(parameters)).write.parquet(f"{staging}/label_events")
        truth(rows).write.parquet(f"{staging}/truth")
        items(run.spark, parameters, end).write.parquet(f"{staging}/items")
        counts = figures(rows).first()
        _write_text(run.spark, f"{staging}/world.json", parameters.to_json())
        _swap(run.spark, staging, target)
    finally:
        rows.unpersist()
        _delete(run.spark, staging)
    assert counts is not None
    metrics = {name: float(value) for name, value in counts.asDict().items() if value is not None}
    return Report(rows_out=counts["rows"], metrics={**metrics, "users": parameters.users, "items": parameters.items})


def _files(parameters: WorldParameters) -> int:
    """Conversions are about one row in a thousand: one file for the work of a hundred tasks."""
    return max(1, parameters.users // (100 * USERS_PER_TASK))


def _write_text(spark: SparkSession, uri: str, text: str) -> None:
    files, path = file_system(spark, uri)
    stream = files.create(path)
    stream.write(bytearray(text.encode()))
    stream.close()


def _swap(spark: SparkSession, staging: str, target: str) -> None:
    """Puts a finished folder in the place of another. Raises RunFailed if the storage refuses."""
    files, new = file_system(spark, staging)
    _, place = file_system(spark, target)
    _, old = file_system(spark, f"{staging}-old")
    if files.exists(place) and not files.rename(place, old):
        raise RunFailed(f"{target} could not be moved away; is it in use?")
    if not files.rename(new, place):
        files.rename(old, place)
        raise RunFailed(f"{staging} could not be renamed to {target}")
    files.delete(old, True)


def _delete(spark: SparkSession, uri: str) -> None:
    files, path = file_system(spark, uri)
    files.delete(path, True)


if __name__ == "__main__":
    main("make_world")
