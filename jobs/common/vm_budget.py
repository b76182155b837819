"""How much of a slice's budget had to be spent until a row's pair was bought: the base of the budget sweep."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of
from jobs.common.tables import Tables

MICRO = 1_000_000


def with_bought_at(
    tables: Tables, rows: DataFrame, shares: Sequence[float], first: datetime, last: datetime, ttl_hours: float
) -> DataFrame:
    """rows (training_rows of windows that begin in [first, last]) with bought_at DOUBLE: the smallest of the shares
    (ascending) of its slice's budget that buys the served pair; null where no pair of the row's own was served, or its
    slice is not known any more.

    A smaller budget buys the pairs with the most expected rows of those that this one bought. Where a user's first pair
    pays for more than itself that is nearly, not quite, what predict_pairs would choose.
    """
    if not shares:
        return rows.withColumn("bought_at", F.lit(None).cast("double"))
    bought = (
        tables.read("candidate_pairs")
        .where((F.col("slice") > slice_of(first - timedelta(hours=ttl_hours))) & (F.col("slice") <= slice_of(last)))
        .where("action = 'compute'")
        .select("slice", "user_id", "item_id", "expected_rows", F.unix_micros("as_of").alias("computed"))
    )
    # The best pair that each share of the slice's pairs leaves out: one row a slice.
    least = [F.percentile_approx("expected_rows", 1 - share, 10_000).alias(f"_{n}") for n, share in enumerate(shares)]
    reached = bought.join(F.broadcast(bought.groupBy("slice").agg(*least)), "slice")
    enough = [
        F.when(F.lit(share >= 1) | (F.col("expected_rows") > F.col(f"_{n}")), F.lit(float(share)))
        for n, share in enumerate(shares)
    ]
    places = reached.select("user_id", "item_id", "computed", F.coalesce(*enough).alias("bought_at"))
    # A served age is in whole seconds.
    computed = F.unix_micros("event_time") - F.col("age_seconds").cast("bigint") * F.lit(MICRO)
    of_row = (
        (rows["user_id"] == places["user_id"])
        & (rows["item_id"] == places["item_id"])
        & (rows["tier"] == "pair")
        & (F.abs(places["computed"] - computed) <= MICRO)
    )
    return rows.join(places, of_row, "left").select(rows["*"], "bought_at")
