"""The sums behind the user means, kept from run to run: what a run adds, and whether the earlier ones still hold."""

from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import from_micros, slice_of, ts
from jobs.common.log import latest_per
from jobs.common.runs import Run
from solaris_udf.partial_means import PARTIAL_DDL, pair_sums

PAIR = ("user_id", "item_id")


@dataclass(frozen=True)
class Addition:
    """What this run adds to the sums of the earlier ones; full: to nothing, as they do not hold."""

    sums: DataFrame  # PARTIAL_DDL
    full: bool


def addition(run: Run, window: DataFrame, hours: float, basis: str, by_probability: bool) -> Addition:
    """The sums of the newest slice's pairs less those that they replace; or of the whole window.

    window: pair_embeddings rows of one version, computed in (as_of - hours, as_of]. Read whole only where the sums of
    its earlier slices are missing, out of date or of another basis; else two columns of it, and the vectors of slices
    of which a pair was computed again.
    """
    runs = {row.slice: row.run_id for row in window.select("slice", "run_id").distinct().collect()}
    earlier = {(name, run_id) for name, run_id in runs.items() if name != run.slice}
    known = _known(run, hours, basis).where(F.col("slice") < run.slice)
    held = known.select(F.unix_micros("computed_at").alias("computed"), "pairs_run").distinct().collect()
    if not earlier or {(slice_of(from_micros(row.computed)), row.pairs_run) for row in held} != earlier:
        latest = latest_per(window, *PAIR)
        return Addition(_sums(latest.withColumn("sign", F.lit(1)), by_probability), True)
    new, old = window.where(F.col("slice") == run.slice), window.where(F.col("slice") < run.slice)
    keys = new.select(*PAIR)
    again = old.select(*PAIR, "slice").join(keys, [*PAIR], "left_semi").select("slice").distinct().collect()
    rows = new.withColumn("sign", F.lit(1))
    if again:
        of_slices = old.where(F.col("slice").isin([row.slice for row in again]))
        replaced = latest_per(of_slices.join(keys, [*PAIR], "left_semi"), *PAIR)
        rows = rows.unionByName(replaced.withColumn("sign", F.lit(-1)))
    return Addition(_sums(rows, by_probability), False)


def store(run: Run, added: Addition, sums: DataFrame, basis: str) -> DataFrame:
    """Writes the addition's sums (persisted by the caller) as this run's slice; returns all sums of the window:
    user_id, computed_micros, sums, weight, pair_count."""
    rows = sums.where(F.col("reason").isNull()).withColumns(
        {
            "computed_at": F.timestamp_micros("computed_micros"),
            "basis": F.lit(basis),
            "full": F.lit(added.full),
        }
    )
    run.write(rows.drop("computed_micros", "pairs_seen", "reason", "row"), "user_sums")
    hours = run.config.serving.user_mean_hours
    return _known(run, hours, basis).select(
        "user_id", F.unix_micros("computed_at").alias("computed_micros"), "sums", "weight", "pair_count"
    )


def _known(run: Run, hours: float, basis: str) -> DataFrame:
    """The stored sums of pairs computed in (as_of - hours, as_of], from the latest full slice on.

    A full slice before the window has nothing to say about it, and the slices after it follow one another.
    """
    start = run.as_of - timedelta(hours=hours)
    rows = run.tables.read("user_sums").where(
        (F.col("slice") > slice_of(start)) & (F.col("slice") <= run.slice) & (F.col("basis") == basis)
    )
    full: str | None = rows.where("full").agg(F.max("slice").alias("slice")).first()["slice"]  # type: ignore[index]
    return rows.where((F.col("computed_at") > ts(start)) & (F.col("slice") >= (full or "")))


def _sums(rows: DataFrame, by_probability: bool) -> DataFrame:
    stream = (
        rows.select(
            "user_id",
            "item_id",
            F.unix_micros("as_of").alias("computed_micros"),
            "embedding",
            "codec",
            "probability",
            "run_id",
            "sign",
        )
        .repartition("user_id")
        .sortWithinPartitions("user_id", "computed_micros", "item_id", "sign")
    )
    return stream.mapInArrow(lambda batches: pair_sums(batches, by_probability), PARTIAL_DDL)
