"""Chooses the pairs that a budget buys, distributed: what solaris_udf/selection.py defines, without a global sort.

The greedy order by density is cut with a histogram: whole buckets before the cut are taken, and only the one bucket in
which the budget ends is sorted. The driver sees at most a few thousand counts.
"""

import math
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from solaris_udf.selection import BUCKETS, BUCKETS_PER_DOUBLING, TOP_DOUBLING, Bucket, Costs, Cut, find_cut

ROWS_PER_TASK = 500_000  # of the bucket in which the budget ends; a task sorts and counts this many in about a second


@dataclass(frozen=True)
class Limits:
    """What no budget may exceed. 0 pairs or users: no limit."""

    min_probability: float = 0.0
    pairs_per_user: int = 0
    users_per_item: int = 0


def with_density(scored: DataFrame, costs: Costs, limits: Limits, mean_worth: float = 0.0) -> DataFrame:
    """Adds place, rank, bucket and density to scored pairs (user_id, item_id, probability, expected_rows, fresh, ...).

    place: among all pairs of the user by expected rows. rank: the same among the user's eligible pairs by expected
    rows, null for those that can't be computed: fresh ones, those below the limits, and those that are expected to
    bring nothing. density: what a pair brings per cost of one pair. That is its expected rows, and for the first pair
    of a user without a fresh one mean_worth times the rows of the user's other pairs, which the mean will serve.
    """
    eligible = ~F.col("fresh") & (F.col("probability") >= limits.min_probability) & (F.col("expected_rows") > 0)
    marked = scored.withColumn("eligible", eligible)
    if limits.users_per_item:
        of_item = Window.partitionBy("item_id", "eligible").orderBy(F.col("expected_rows").desc(), F.col("user_id"))
        marked = marked.withColumn(
            "eligible", F.col("eligible") & (F.row_number().over(of_item) <= limits.users_per_item)
        )
    of_user = Window.partitionBy("user_id", "eligible")
    ordered = of_user.orderBy(F.col("expected_rows").desc(), F.col("item_id"))
    ranked = marked.withColumn("rank", F.row_number().over(ordered).cast("bigint"))
    if limits.pairs_per_user:
        ranked = ranked.withColumn("eligible", F.col("eligible") & (F.col("rank") <= limits.pairs_per_user))
        of_user = Window.partitionBy("user_id", "eligible")
        ordered = of_user.orderBy("rank")
    place_in_all = Window.partitionBy("user_id").orderBy(F.col("expected_rows").desc(), F.col("item_id"))
    running = ordered.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    worth = F.col("expected_rows")
    if mean_worth:
        of_all = Window.partitionBy("user_id")
        millionths = F.round(F.col("expected_rows") * 1e6).cast("bigint")  # their sum does not depend on the order
        others = (F.sum(millionths).over(of_all) - millionths) / 1e6
        opens = F.col("eligible") & (F.col("rank") == 1) & ~F.max("fresh").over(of_all)
        worth += F.when(opens, F.lit(mean_worth) * others).otherwise(0.0)
    ratio = F.sum("worth").over(running) / (F.lit(costs.per_user / costs.per_pair) + F.col("rank"))
    density = F.least(F.col("worth"), F.max("ratio").over(of_user))
    bucket = F.floor((F.lit(TOP_DOUBLING) - F.log2("density")) * BUCKETS_PER_DOUBLING)
    return (
        ranked.withColumn("worth", worth)
        .withColumn("ratio", ratio)
        .withColumn("place", F.row_number().over(place_in_all).cast("bigint"))
        .withColumn("density", F.when(F.col("eligible"), density))
        .withColumn("rank", F.when(F.col("eligible"), F.col("rank")))
        .withColumn(
            "bucket", F.when(F.col("eligible"), F.least(F.greatest(bucket, F.lit(0)), F.lit(BUCKETS - 1)).cast("int"))
        )
        .drop("eligible", "worth", "ratio")
    )


@dataclass(frozen=True)
class Supply:
    """What there is to choose from."""

    candidates: int
    fresh: int
    eligible: int
    expected_rows: float
    buckets: tuple[Bucket, ...]


def supply_of(ranked: DataFrame) -> Supply:
    """Counts candidates by density bucket: one row a bucket, at most BUCKETS + 2 of them."""
    rows = (
        ranked.groupBy("bucket", "fresh")
        .agg(
            F.count("*").alias("pairs"),
            F.count_if(F.col("rank") == 1).alias("firsts"),
            # Whole millionths: the sum must not depend on the order in which partitions arrive.
            F.sum(F.round(F.col("expected_rows") * 1e6).cast("bigint")).alias("expected_rows"),
        )
        .collect()
    )
    buckets = tuple(
        Bucket(row.bucket, row.pairs, row.firsts, row.expected_rows / 1e6)
        for row in sorted(rows, key=lambda row: -1 if row.bucket is None else row.bucket)
        if row.bucket is not None
    )
    return Supply(
        candidates=sum(row.pairs for row in rows),
        fresh=sum(row.pairs for row in rows if row.fresh),
        eligible=sum(bucket.pairs for bucket in buckets),
        expected_rows=sum(row.expected_rows for row in rows) / 1e6,
        buckets=buckets,
    )


@dataclass(frozen=True)
class Choice:
    """pairs: what with_density gave, and action (compute, reuse or skip). Release it when it has been written."""

    pairs: DataFrame
    cut: Cut
    held: DataFrame | None = None

    def release(self) -> None:
        """Frees what the choice keeps in memory."""
        if self.held is not None:
            self.held.unpersist()


def choose(ranked: DataFrame, supply: Supply, costs: Costs, budget: float) -> Choice:
    """Decides each candidate. budget is in the unit of costs. Raises ValueError if it is not more than 0."""
    cut = find_cut(list(supply.buckets), costs, budget)
    before, at = F.col("bucket") < cut.bucket, F.col("bucket") == cut.bucket
    sure = F.when(F.col("fresh"), "reuse").when(before, "compute").otherwise("skip")
    if cut.bucket == BUCKETS:
        return Choice(ranked.withColumn("action", sure), cut)
    size = next(bucket.pairs for bucket in supply.buckets if bucket.bucket == cut.bucket)
    clear = ranked.where(~F.coalesce(at, F.lit(False))).withColumn("action", sure)
    counted, held = _running_counts(ranked.where(at), math.ceil(size / ROWS_PER_TASK))
    cost = (F.col("_users") + cut.users) * F.lit(costs.per_user) + (F.col("_pairs") + cut.pairs) * F.lit(costs.per_pair)
    edge = counted.withColumn("action", F.when(cost <= F.lit(budget), "compute").otherwise("skip")).drop(
        "_users", "_pairs"
    )
    return Choice(clear.unionByName(edge), cut, held)


def _running_counts(rows: DataFrame, tasks: int) -> tuple[DataFrame, DataFrame | None]:
    """Adds _pairs and _users: how many pairs and first pairs of users there are up to each row, in greedy order.

    Also returns what it persisted, if anything.
    """
    order: list[Column] = [F.col("density").desc(), F.col("user_id"), F.col("rank")]
    first = (F.col("rank") == 1).cast("bigint")
    if tasks == 1:
        running = Window.orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
        return rows.withColumns({"_pairs": F.row_number().over(running), "_users": F.sum(first).over(running)}), None
    # Kept, so that the rows stay in the partitions that were counted.
    spread = rows.repartitionByRange(tasks, *order).withColumn("_part", F.spark_partition_id()).persist()
    parts = spread.groupBy("_part").agg(F.count("*").alias("pairs"), F.sum(first).alias("firsts")).collect()
    offsets, pairs, users = [], 0, 0
    for part in sorted(parts, key=lambda row: row._part):
        offsets.append((part._part, pairs, users))
        pairs, users = pairs + part.pairs, users + part.firsts
    start = rows.sparkSession.createDataFrame(offsets, "_part INT, _pairs_before BIGINT, _users_before BIGINT")
    running = Window.partitionBy("_part").orderBy(*order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    counted = (
        spread.join(F.broadcast(start), "_part", "inner")
        .withColumn("_pairs", F.row_number().over(running) + F.col("_pairs_before"))
        .withColumn("_users", F.sum(first).over(running) + F.col("_users_before"))
        .drop("_part", "_pairs_before", "_users_before")
    )
    return counted, spread
