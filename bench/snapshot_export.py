"""How fast export_snapshot goes from Delta tables to a published snapshot."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from measure import Figure, at_least
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import load_config
from jobs.common.runs import execute
from jobs.common.session import build_session
from jobs.common.tables import Tables
from solaris_udf.codec import encode

AS_OF = datetime(2026, 1, 3, tzinfo=UTC)
DIM, ITEMS = 64, 50
IDS = "user_id BIGINT, item_id BIGINT, embedding BINARY"


def fill(spark: SparkSession, tables: Tables, pairs: int) -> None:
    """pair_embeddings and user_embeddings of one slice: ITEMS pairs a user, each user with a mean."""

    # Within this function, so that it travels to the workers by value: they can't import a benchmark.
    def random_vectors(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """(user_id, item_id) in, the same with a random float16 vector out."""
        for batch in batches:
            draw = np.random.default_rng(batch.column(0)[0].as_py() & 0xFFFF)
            vectors = encode(draw.standard_normal((batch.num_rows, DIM), dtype=np.float32), "float16")
            yield pa.RecordBatch.from_arrays([*batch.columns, vectors], ["user_id", "item_id", "embedding"])

    def stamped(frame: DataFrame) -> DataFrame:
        return frame.withColumns(
            {
                "codec": F.lit("float16"),
                "model_version": F.lit("bench"),
                "slice": F.lit(slice_of(AS_OF)),
                "as_of": ts(AS_OF),
                "run_id": F.lit("bench"),
            }
        )

    user = F.xxhash64(F.floor(F.col("id") / ITEMS)).alias("user_id")
    ids = spark.range(0, pairs, 1, 8).select(user, (F.pmod("id", F.lit(ITEMS)) * 7919).alias("item_id"))
    rows = stamped(ids.mapInArrow(random_vectors, IDS)).withColumn("probability", F.lit(0.5))
    tables.replace(rows, "pair_embeddings", slice=slice_of(AS_OF))
    ids = spark.range(0, pairs // ITEMS, 1, 2).select(
        F.xxhash64("id").alias("user_id"), F.lit(0).cast("bigint").alias("item_id")
    )
    rows = stamped(ids.mapInArrow(random_vectors, IDS)).drop("item_id")
    rows = rows.withColumns({"pair_count": F.lit(ITEMS).cast("int"), "newest_at": ts(AS_OF)})
    tables.replace(rows, "user_embeddings", slice=slice_of(AS_OF))


def export_rate(folder: Path, pairs: int) -> list[Figure]:
    """Seconds of whole runs of export_snapshot on two cores: reading, sorting, writing, hashing, checks and the flip.

    The first run also warms the JVM up; the second is measured.
    """
    overrides = [
        f"storage.root={folder}",
        "spark.master=local[2]",
        "spark.driver_memory=6g",
        "spark.shuffle_partitions=8",
    ]
    config = load_config([], overrides)
    spark = build_session(config, "bench snapshot export")
    try:
        fill(spark, Tables(spark, config.path("tables")), pairs)
        outcomes = [execute("export_snapshot", spark, config, AS_OF) for _ in range(2)]
    finally:
        spark.stop()
    outcome = outcomes[-1]
    return [
        at_least("export, Delta to a live snapshot", pairs / outcome.seconds, "pairs/s", 150_000),
        Figure("of it sorting and writing files", pairs / outcome.report.metrics["seconds"], "pairs/s"),
    ]
