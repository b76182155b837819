"""What the log says about pairs and users before each reference time: the base of candidates and features.

One training run looks from many reference times, so every frame here has a column `at` (microseconds since 1970 UTC)
and one plan serves them all; a predicting run has a single one. All sums are of integers: the result does not depend
on the order in which Spark adds, and so not on the partitioning.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import micros
from jobs.common.log import items_at, log_before
from jobs.common.tables import Tables

HOUR = 3_600_000_000  # microseconds
BUCKET = HOUR // 6  # requests are counted by ten minutes: a bounded number per user, however active
HASH_RANGE = 1 << 30
DECAY_UNIT = 1_000_000  # decayed counts are whole millionths of a row
PER_USER = ("at", "user_id")


@dataclass(frozen=True)
class View:
    """What was known at each reference time, within the lookback.

    rows: at, user_id, item_id, request_id, age (microseconds before at, > 0), shown, clicked.
    everyone: the same of all users, where the view is of a part of them.
    pairs: one row per (at, user_id, item_id), see pair_statistics; of each user the `pairs_per_user` most frequent.
    users: one per (at, user_id), see user_statistics. tastes: one per (at, user_id, kind, key), see taste_statistics.
    item_counts: one per (at, item_id), see item_statistics, over all users also where the rest is of a part of them.
    items: item_id, category_id, advertiser_id, created (microseconds, null if unknown).

    pairs, users and tastes are partitioned by (at, user_id) and bounded per user, so what follows needs no shuffle to
    rank or join within users, and a very active user weighs on no task more than the bound.
    """

    tables: Tables
    times: tuple[datetime, ...]
    window_hours: float
    lookback_hours: float
    ttl_hours: float
    rows: DataFrame
    everyone: DataFrame
    pairs: DataFrame
    users: DataFrame
    tastes: DataFrame
    item_counts: DataFrame
    items: DataFrame


@dataclass(frozen=True)
class Horizon:
    """How far a view looks. All in hours but pairs_per_user."""

    window: float
    lookback: float
    half_life: float
    ttl: float
    pairs_per_user: int = 1000


@contextmanager
def open_view(
    tables: Tables, times: Sequence[datetime], horizon: Horizon, read_at: datetime, part_of_users: float = 1.0
) -> Iterator[View]:
    """The view from reference times, all at or before read_at, the as_of of the run that reads.

    Each time sees rows with event_time in [time - lookback, time) that had arrived by then. Of items it sees those
    created before it; what is known of them is as of read_at, because a log loaded at once has no older state of its
    items.

    part_of_users: a trainer looks at this part of the users only, chosen by hash, but at all that is scored for items.
    """
    everyone = log_rows(tables, times, horizon.lookback, read_at)
    rows = everyone
    if part_of_users < 1:
        rows = rows.where(F.pmod(F.xxhash64("user_id"), F.lit(HASH_RANGE)) < round(part_of_users * HASH_RANGE))
    items = (
        items_at(tables, read_at)
        .select("item_id", "category_id", "advertiser_id", F.unix_micros("created_at").alias("created"))
        .persist()
    )
    pairs = (
        best_per(
            pair_statistics(rows, horizon.window, horizon.half_life), PER_USER, frequent_first(), horizon.pairs_per_user
        )
        .drop("place")
        .persist()
    )
    users = user_statistics(rows, pairs, horizon.window).persist()
    tastes = taste_statistics(pairs, items).persist()
    item_counts = item_statistics(everyone, horizon.window).persist()
    try:
        yield View(
            tables,
            tuple(times),
            horizon.window,
            horizon.lookback,
            horizon.ttl,
            rows,
            everyone,
            pairs,
            users,
            tastes,
            item_counts,
            items,
        )
    finally:
        for frame in (item_counts, tastes, users, pairs, items):
            frame.unpersist()


def frequent_first() -> list[Column]:
    """The order of a user's pairs by decayed frequency, ties by the later one, then by item."""
    return [F.col("decayed").desc(), F.col("last_age"), F.col("item_id")]


def best_per(frame: DataFrame, key: Sequence[str], order: Sequence[Column], cap: int) -> DataFrame:
    """The first `cap` rows per key, numbered by `place`. Spark cuts each partition before it shuffles, so one hot key
    costs its task no more than cap rows from each."""
    window = Window.partitionBy(*key).orderBy(*order)
    return frame.withColumn("place", F.row_number().over(window)).where(F.col("place") <= cap)


def log_rows(tables: Tables, times: Sequence[datetime], lookback_hours: float, read_at: datetime) -> DataFrame:
    """View.rows: each row of the log once for each reference time that may see it."""
    span = (max(times) - min(times)) / timedelta(hours=1)
    event, arrived = F.unix_micros("event_time"), F.unix_micros("arrived_at")
    seen_from = F.filter(
        F.array(*(F.lit(micros(time)) for time in times)),
        lambda at: (event < at) & (event >= at - round(lookback_hours * HOUR)) & (arrived <= at),
    )
    return (
        log_before(tables, max(times), span + lookback_hours, read_at)
        .select(
            "user_id",
            "item_id",
            "request_id",
            "shown",
            "clicked",
            event.alias("event"),
            F.explode(seen_from).alias("at"),
        )
        .select(
            "at", "user_id", "item_id", "request_id", (F.col("at") - F.col("event")).alias("age"), "shown", "clicked"
        )
    )


def pair_statistics(rows: DataFrame, window_hours: float, half_life_hours: float) -> DataFrame:
    """One row per (at, user_id, item_id): counts by age, decayed counts, ages of the last and first row.

    decayed: sum of 2^(-age / half-life), in millionths; decayed_slow with four times the half-life. last_bucket and
    first_bucket: ten-minute buckets of the ages, 0 the latest.
    """
    age = F.col("age")

    def within(hours: float, condition: Column | None = None) -> Column:
        inside = age <= round(hours * HOUR)
        return F.count_if(inside if condition is None else inside & condition)

    def decay(hours: float) -> Column:
        return F.sum(F.round(F.pow(F.lit(2.0), -age / (hours * HOUR)) * DECAY_UNIT).cast("bigint"))

    return rows.groupBy("at", "user_id", "item_id").agg(
        F.count("*").alias("rows"),
        within(1).alias("rows_1h"),
        within(6).alias("rows_6h"),
        within(24).alias("rows_24h"),
        within(window_hours).alias("rows_window"),
        F.count_if("shown").alias("shown"),
        within(24, F.col("shown")).alias("shown_24h"),
        F.count_if("clicked").alias("clicked"),
        decay(half_life_hours).alias("decayed"),
        decay(4 * half_life_hours).alias("decayed_slow"),
        F.min("age").alias("last_age"),
        F.max("age").alias("first_age"),
        bucket_of(F.min("age")).alias("last_bucket"),
        bucket_of(F.max("age")).alias("first_bucket"),
    )


def user_statistics(rows: DataFrame, pairs: DataFrame, window_hours: float) -> DataFrame:
    """One row per (at, user_id): requests by age and when in the day, and how much the user's pairs repeat.

    buckets, before: the ten-minute buckets with requests, latest first, and how many requests came after each (both
    ARRAY, bounded by the lookback). requests_profile: requests in the hours of the day that the coming window covers.
    cos_1, sin_1, cos_2, sin_2: sums over requests, in millionths, of the first two harmonics of the time of day,
    counted from the middle of the coming window: where in the user's day it lies, also from a few requests.
    """
    buckets = (
        rows.select(*PER_USER, "request_id", bucket_of(F.col("age")).alias("bucket"))
        .distinct()
        .groupBy(*PER_USER, "bucket")
        .agg(F.count("*").alias("requests"))
    )
    newer = Window.partitionBy(*PER_USER).orderBy("bucket").rowsBetween(Window.unboundedPreceding, -1)
    day, requests = 24 * HOUR // BUCKET, F.col("requests")
    coming = F.pmod(-F.col("bucket") - 1, F.lit(day)) < min(day, round(window_hours * HOUR / BUCKET))

    def within(hours: float) -> Column:
        return F.sum(F.when(F.col("bucket") < round(hours * HOUR / BUCKET), requests).otherwise(0))

    angle = 2 * math.pi * ((F.col("bucket") + 0.5) / day + window_hours / 48)

    def harmonic(value: Column) -> Column:
        return F.sum(F.round(value * DECAY_UNIT).cast("bigint") * requests)

    by_time = (
        buckets.withColumn("after", F.coalesce(F.sum("requests").over(newer), F.lit(0)))
        .groupBy(*PER_USER)
        .agg(
            F.sum("requests").alias("requests"),
            within(1).alias("requests_1h"),
            within(6).alias("requests_6h"),
            within(24).alias("requests_24h"),
            F.sum(F.when(coming, requests).otherwise(0)).alias("requests_profile"),
            harmonic(F.cos(angle)).alias("cos_1"),
            harmonic(F.sin(angle)).alias("sin_1"),
            harmonic(F.cos(2 * angle)).alias("cos_2"),
            harmonic(F.sin(2 * angle)).alias("sin_2"),
            F.min("bucket").alias("user_last_bucket"),
            F.array_sort(F.collect_list(F.struct("bucket", "after"))).alias("places"),
        )
        .withColumns({"buckets": F.col("places.bucket"), "before": F.col("places.after")})
        .drop("places")
    )
    habits = pairs.groupBy(*PER_USER).agg(
        F.sum("rows").alias("user_rows"),
        F.sum("rows_24h").alias("user_rows_24h"),
        F.max("first_age").alias("user_first_age"),
        F.count_if(F.col("last_age") <= 24 * HOUR).alias("pairs_24h"),
        F.count_if(F.col("first_age") <= 24 * HOUR).alias("new_pairs_24h"),
        F.count_if(F.col("last_age") <= 6 * HOUR).alias("pairs_6h"),
        F.count_if(F.col("first_age") <= 6 * HOUR).alias("new_pairs_6h"),
    )
    return by_time.join(habits, [*PER_USER], "inner")


def taste_statistics(pairs: DataFrame, items: DataFrame) -> DataFrame:
    """One row per (at, user_id, kind, key), kind being category or advertiser: the user's decayed rows of such items
    (weight), its part of all with a known one (share), and its place among them, 1 first."""
    kinds = F.array(
        F.struct(F.lit("category").alias("kind"), F.col("category_id").alias("key")),
        F.struct(F.lit("advertiser").alias("kind"), F.col("advertiser_id").alias("key")),
    )
    known = (
        items.select("item_id", F.explode(kinds).alias("taste")).select("item_id", "taste.*").where("key IS NOT NULL")
    )
    summed = (
        pairs.select(*PER_USER, "item_id", "decayed_slow")
        .join(known, "item_id", "inner")
        .groupBy(*PER_USER, "kind", "key")
        .agg(F.sum("decayed_slow").alias("weight"))
    )
    within = Window.partitionBy(*PER_USER, "kind")
    return summed.withColumns(
        {
            "share": F.col("weight") / F.greatest(F.sum("weight").over(within), F.lit(1)),
            "place": F.row_number().over(within.orderBy(F.col("weight").desc(), F.col("key"))),
        }
    )


def item_statistics(rows: DataFrame, window_hours: float) -> DataFrame:
    """One row per (at, item_id): rows by age, over all users."""
    age = F.col("age")

    def within(hours: float) -> Column:
        return F.count_if(age <= round(hours * HOUR))

    return rows.groupBy("at", "item_id").agg(
        F.count("*").alias("item_rows"),
        within(1).alias("item_rows_1h"),
        within(6).alias("item_rows_6h"),
        within(24).alias("item_rows_24h"),
        within(window_hours).alias("item_rows_window"),
        F.max("age").alias("item_first_age"),
        F.min("age").alias("item_last_age"),
    )


def bucket_of(age: Column) -> Column:
    """The ten-minute bucket of an age in microseconds, INT, 0 the latest; an age is never 0, its last instant
    counts down.
    """
    return F.floor((age - 1) / F.lit(BUCKET)).cast("int")
