"""How fast join_features gives log rows what a snapshot would have served: whole runs on two cores.

A snapshot of PAIRS pairs and a fiftieth as many users, 64 float16 dimensions, is live for all of a window. Half of the
window's rows ask for pairs that it holds, half for others of the same users, who have a mean. The same job runs on a
window of n and on one of 4 n rows; linear in rows means the same rate. Reading, joining, writing and committing count.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

from measure import Figure, arguments, at_least, report
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from snapshot_export import AS_OF, ITEMS, fill

from jobs.common.clock import slice_of, ts
from jobs.common.config import load_config
from jobs.common.runs import execute
from jobs.common.session import build_session
from jobs.common.tables import Tables

HOURS = 6


def fill_log(spark: SparkSession, tables: Tables, end: int, pairs: int, rows: int) -> None:
    """The ranking_log slice of the window number `end` after the snapshot, which asks for hits and misses in turn."""
    as_of = AS_OF + timedelta(hours=HOURS * end)
    user = F.xxhash64(F.pmod("place", F.lit(pairs // ITEMS)))
    item = F.pmod(F.floor(F.col("place") / (pairs // ITEMS)), F.lit(2 * ITEMS)) * 7919
    micros = F.pmod(F.xxhash64("id"), F.lit(int(timedelta(hours=HOURS - 1) / timedelta(microseconds=1))))
    log = (
        spark.range(0, rows, 1, 8)
        .withColumn("place", F.pmod(F.xxhash64("id", F.lit(end)), F.lit(2 * pairs)))
        .select(
            F.lit(slice_of(as_of)).alias("slice"),
            ts(as_of).alias("as_of"),
            F.lit("bench").alias("run_id"),
            F.concat_ws("-", F.lit(end), (F.col("id") / 16).cast("bigint")).alias("request_id"),
            F.timestamp_micros(F.unix_micros(ts(as_of)) - 1 - micros).alias("event_time"),
            ts(as_of).alias("arrived_at"),
            user.alias("user_id"),
            item.alias("item_id"),
            F.lit("feed").alias("surface"),
            F.lit(None).cast("int").alias("position"),
            (F.pmod("id", F.lit(5)) == 0).alias("shown"),
            F.lit(False).alias("clicked"),
            F.lit(None).cast("map<string,double>").alias("labels"),
            F.lit(None).cast("binary").alias("served_embedding"),
            F.lit(None).cast("string").alias("user_group"),
        )
    )
    tables.replace(log, "ranking_log", slice=slice_of(as_of))


def rates(folder: Path, pairs: int, rows: int) -> list[Figure]:
    """Rows a second of a run on `rows` and on four times as many; a run before warms the JVM up."""
    overrides = [f"storage.root={folder}", "spark.master=local[2]", "spark.driver_memory=6g"]
    config = load_config([], [*overrides, "spark.shuffle_partitions=8", "serving.ttl_hours=72"])
    spark = build_session(config, "bench join_features")
    try:
        tables = Tables(spark, config.path("tables"))
        fill(spark, tables, pairs)
        execute("export_snapshot", spark, config, AS_OF)
        found = []
        for end, count in enumerate((rows, rows, 4 * rows), start=1):
            fill_log(spark, tables, end, pairs, count)
            outcome = execute("join_features", spark, config, AS_OF + timedelta(hours=HOURS * end))
            found.append(outcome.report.rows_out / outcome.seconds)
        tiers = tables.read_slice("training_rows", AS_OF + timedelta(hours=3 * HOURS)).groupBy("tier").count().collect()
    finally:
        spark.stop()
    shares = {row.tier: row["count"] / (4 * rows) for row in tiers}
    return [
        at_least(f"join_features, {4 * rows:,} rows", found[2], "rows/s", 100_000),
        Figure(f"join_features, {rows:,} rows", found[1], "rows/s"),
        at_least("the larger run's rate / the smaller one's", found[2] / found[1], "", 0.8),
        Figure("rows answered by their pair", shares.get("pair", 0.0), "share"),
        Figure("rows answered by the user's mean", shares.get("user_mean", 0.0), "share"),
    ]


if __name__ == "__main__":
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        sizes = (50_000, 100_000) if options.quick else (500_000, 1_000_000)
        report("join_features on two cores", rates(Path(temporary), *sizes), options.json)
