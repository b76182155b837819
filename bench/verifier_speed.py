"""How fast candidates are scored, and how the whole job's time grows with them."""

import math
import resource
import shutil
import statistics
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from measure import Figure, at_least, at_most
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import load_config
from jobs.common.models import model_folder
from jobs.common.pair_features import FEATURES
from jobs.common.pair_scores import score
from jobs.common.runs import execute
from jobs.common.session import build_session
from jobs.common.tables import Tables
from solaris_udf.verifier import Verifier, save

AS_OF = datetime(2026, 1, 5, tzinfo=UTC)
PAIRS_PER_USER = 100
MAX_RESULT = "64m"  # what the driver may be sent in one job: far less than the candidates, at any size
SECOND = 1_000_000


def some_verifier(window_hours: float) -> Verifier:
    """One of the default size, with weights of no meaning; fewer hours since the last row are better."""
    draw, sizes = np.random.default_rng(0), (len(FEATURES), 64, 32, 2)
    layers = [(draw.normal(size=(out, into)) / math.sqrt(into), np.zeros(out)) for into, out in pairwise(sizes)]
    return Verifier(FEATURES, window_hours, np.zeros(sizes[0]), np.ones(sizes[0]), tuple(layers))


def scoring_rate(spark: SparkSession, rows: int = 1_000_000, repeats: int = 3) -> list[Figure]:
    """Candidates a second through predict_pairs.score, features in memory: Spark to Python and back included."""
    values = [(F.pmod(F.xxhash64("id", F.lit(place)), F.lit(1000)) / 10.0).alias(n) for place, n in enumerate(FEATURES)]
    ids = [F.col("id").alias("user_id"), F.col("id").alias("item_id"), F.array(F.lit("recent")).alias("sources")]
    described = spark.range(0, rows, 1, 2).select(*ids, *values).persist()
    described.count()
    seconds = []
    try:
        for _ in range(repeats + 1):
            clock = time.perf_counter()
            score(described, some_verifier(6.0)).write.format("noop").mode("overwrite").save()
            seconds.append(time.perf_counter() - clock)
    finally:
        described.unpersist()
    return [at_least("scoring, 2 cores", rows / statistics.median(seconds[1:]), "candidates/s", 300_000)]


def synthetic_log(spark: SparkSession, users: int) -> DataFrame:
    """PAIRS_PER_USER pairs a user over three days, ten to a request, a third of them scored again a day later."""
    requests = PAIRS_PER_USER // 10
    rows = spark.range(0, users * PAIRS_PER_USER, 1, max(2, users // 5_000)).select(
        F.floor(F.col("id") / PAIRS_PER_USER).alias("user"), F.pmod("id", F.lit(PAIRS_PER_USER)).alias("place")
    )
    again = F.explode(F.when(F.pmod("place", F.lit(3)) == 0, F.array(F.lit(0), F.lit(1))).otherwise(F.array(F.lit(0))))
    user_id = F.xxhash64("user")
    request = F.floor(F.col("place") / 10) + requests * F.col("again")
    age = F.pmod(F.xxhash64("user", request), F.lit(36 * 3600)) + 1 + F.col("again") * 24 * 3600
    event_time = F.timestamp_micros(F.unix_micros(ts(AS_OF)) - age * SECOND)
    return rows.select("user", "place", again.alias("again")).select(
        F.concat_ws("-", "user", request).alias("request_id"),
        event_time.alias("event_time"),
        event_time.alias("arrived_at"),
        user_id.alias("user_id"),
        # Ten neighbouring places of 5,000: a request never names an item twice.
        F.pmod(F.xxhash64("user") + F.col("place"), F.lit(5_000)).alias("item_id"),
        F.lit("feed").alias("surface"),
        F.lit(None).cast("int").alias("position"),
        (F.pmod("place", F.lit(5)) == 0).alias("shown"),
        F.lit(False).alias("clicked"),
        F.lit(None).cast("map<string,double>").alias("labels"),
        F.lit(None).cast("binary").alias("served_embedding"),
        F.lit(None).cast("string").alias("user_group"),
        F.lit(slice_of(AS_OF)).alias("slice"),
        ts(AS_OF).alias("as_of"),
        F.lit("bench").alias("run_id"),
    )


def scaling(cache: Path, sizes: tuple[int, ...] = (1_000_000, 10_000_000)) -> list[Figure]:
    """Seconds of predict_pairs at each number of candidates, in a session whose driver may hold MAX_RESULT a job.

    A job that collected candidates would fail there; the peak memory of the Python driver is given too.
    """
    figures: list[Figure] = []
    measured: list[tuple[int, float, float]] = []
    for size in sizes:
        root = cache / f"scaling-{size}"
        config = load_config(
            [],
            [
                f"storage.root={root}",
                "spark.master=local[2]",
                "spark.shuffle_partitions=16",
                f'spark.conf={{"spark.driver.maxResultSize" = "{MAX_RESULT}"}}',
                "predict_pairs.sources={recent=200, misses=100, rising=10, new_items=10}",
            ],
        )
        spark = build_session(config, "bench verifier scaling")
        try:
            tables = Tables(spark, config.path("tables"))
            users = size // (PAIRS_PER_USER + 10)  # each has ten rising items too
            if not tables.exists("ranking_log"):
                tables.replace(synthetic_log(spark, users), "ranking_log", slice=slice_of(AS_OF))
            save(some_verifier(config.window.hours), model_folder(config, "verifier", AS_OF))
            outcome = execute("predict_pairs", spark, config, AS_OF)
        finally:
            spark.stop()
        shutil.rmtree(root)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured.append((outcome.report.rows_in, outcome.seconds, peak))
        figures.append(Figure(f"predict_pairs, {outcome.report.rows_in:,} candidates", outcome.seconds, "s"))
        figures.append(Figure(f"peak memory of the Python driver, {outcome.report.rows_in:,}", peak, "MiB"))
    (few, quick, before), (many, slow, after) = measured[0], measured[-1]
    exponent = math.log(slow / quick) / math.log(many / few)
    return [
        *figures,
        at_most("exponent of the job's time", exponent, "", 1.1),
        at_most("driver memory, largest against smallest", after / before, "x", 1.1),
    ]
