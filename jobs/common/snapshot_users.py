"""The users of a snapshot: each user's own mean, or that of their best neighbour, and the neighbours to ask; for users
with neither, if wanted, the centroid of their group."""

from datetime import timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import micros, slice_of, ts
from jobs.common.config import Serving
from jobs.common.log import latest_build, latest_per, log_before
from jobs.common.runs import Run
from solaris_udf.means import MEANS_DDL, Weighting, user_means
from solaris_udf.snapshot.shards import USER_COLUMNS
from solaris_udf.tiers import COLD, NEIGHBOR_MEAN, USER_MEAN

# A centroid is over so many members, those of the lowest hashes: it is then some 3% of their spread off the mean over
# all. Up to this number (spark.sql.optimizer.windowGroupLimitThreshold) Spark cuts a group down in each partition
# before it brings it together, so that a group of half of all users makes no task of its size.
GROUP_SAMPLE = 1_000


def fresh_user_means(run: Run, version: str) -> DataFrame:
    """Each user's latest own mean younger than serving.max_user_age_hours; its age is that of its newest pair."""
    start = run.as_of - timedelta(hours=run.config.serving.max_user_age_hours)
    rows = run.tables.read("user_embeddings").where(
        (F.col("slice") > slice_of(start)) & (F.col("slice") <= run.slice) & (F.col("model_version") == version)
    )
    return (
        latest_per(rows, "user_id")
        .where(F.col("newest_at") > ts(start))
        .select("user_id", "embedding", "codec", F.unix_micros("newest_at").alias("computed_at"))
    )


def neighbor_lists(run: Run, version: str, means: DataFrame, count: int) -> DataFrame:
    """The best neighbours of each user that have an own mean (user_id, neighbors), most similar first, ties by id."""
    rows = run.tables.read("user_neighbors").where((F.col("slice") <= run.slice) & (F.col("model_version") == version))
    candidates = (
        latest_build(rows)
        .select("user_id", F.explode("neighbors").alias("neighbor"))
        .select("user_id", F.col("neighbor.user_id").alias("neighbor_id"), "neighbor.similarity")
        .where(
            (F.col("similarity") >= run.config.serving.min_similarity)
            & ~F.isnan("similarity")
            & (F.col("neighbor_id") != F.col("user_id"))
        )
        .join(means.select(F.col("user_id").alias("neighbor_id")), "neighbor_id", "left_semi")
    )
    best = Window.partitionBy("user_id").orderBy(F.col("similarity").desc(), "neighbor_id")
    listed = F.collect_list(F.struct("place", F.col("neighbor_id").alias("user_id"), "similarity"))
    return (
        candidates.withColumn("place", F.row_number().over(best))
        .where(F.col("place") <= count)
        .groupBy("user_id")
        .agg(F.array_sort(listed).alias("neighbors"))
        .select(
            "user_id",
            F.transform(
                "neighbors", lambda one: F.struct(one.user_id.alias("user_id"), one.similarity.alias("similarity"))
            ).alias("neighbors"),
        )
    )


def resolve_users(means: DataFrame, neighbors: DataFrame, serving: Serving, only: Column | None = None) -> DataFrame:
    """One row per user with a vector: their own mean, or that of their best neighbour; and their neighbours.

    Where the tier order puts neighbor_mean first, the neighbour's mean is preferred to the user's own. only: a
    condition on user_id.
    """
    every = F.lit(True) if only is None else only
    order = [tier for tier in serving.tiers if tier in ("user_mean", "neighbor_mean")]
    own, best = F.col("own").isNotNull(), F.try_element_at("neighbors", F.lit(1))
    use_own = own & best.isNull() if order[:1] == ["neighbor_mean"] else own
    chosen = (
        means.where(every)
        .select("user_id", F.lit(True).alias("own"))
        .join(neighbors.where(every), "user_id", "full")
        .select(
            "user_id",
            "neighbors",
            F.when(use_own, F.col("user_id")).otherwise(best.user_id).alias("source_user"),
            F.when(use_own, F.lit(1.0)).otherwise(best.similarity).cast("float").alias("similarity"),
            F.when(use_own, USER_MEAN).otherwise(NEIGHBOR_MEAN).cast("tinyint").alias("tier"),
        )
    )
    return chosen.join(means.withColumnRenamed("user_id", "source_user"), "source_user", "inner").select(*USER_COLUMNS)


def user_groups(run: Run, days: float) -> DataFrame:
    """user_id and group (a hash) of the users of the log's last days who declare one; the last that they declared."""
    rows = log_before(run.tables, run.as_of, days * 24).where(F.col("user_group").isNotNull())
    last = F.max_by("user_group", F.struct("event_time", "user_group"))
    return rows.groupBy("user_id").agg(F.xxhash64(last).alias("group"))


def cold_users(run: Run, means: DataFrame, answered: DataFrame, groups: DataFrame) -> DataFrame:
    """Users with a group whom nothing else answers: the centroid of the means of the users of their group.

    Its age is that of its newest mean; its similarity, which nobody measured, is 0.
    """
    lowest = Window.partitionBy("group").orderBy(F.xxhash64("user_id"), "user_id")
    members = (
        groups.join(means, "user_id")
        .withColumn("place", F.row_number().over(lowest))
        .where(F.col("place") <= GROUP_SAMPLE)
        .select(
            F.col("group").alias("user_id"),
            F.col("user_id").alias("item_id"),
            F.col("computed_at").alias("computed_micros"),
            "embedding",
            "codec",
            F.lit(None).cast("double").alias("probability"),
        )
        .repartition("user_id")
        .sortWithinPartitions("user_id", "item_id")
    )
    weighting = Weighting(micros(run.as_of))
    centroids = members.mapInArrow(lambda batches: user_means(batches, weighting), MEANS_DDL).where("reason IS NULL")
    return (
        groups.join(answered, "user_id", "left_anti")
        .join(centroids.withColumnRenamed("user_id", "group"), "group")
        .select(
            "user_id",
            "embedding",
            F.lit("float16").alias("codec"),
            F.col("newest_micros").alias("computed_at"),
            F.lit(COLD).cast("tinyint").alias("tier"),
            F.col("user_id").alias("source_user"),
            F.lit(0.0).cast("float").alias("similarity"),
            F.lit(None).cast(answered.schema["neighbors"].dataType).alias("neighbors"),
        )
    )
