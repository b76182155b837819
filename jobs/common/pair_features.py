"""The verifier's features of candidate pairs, in Spark SQL, as of each reference time.

Every feature is finite and never null: what is unknown is 0 beside a flag, or the lookback where it is an age.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.common.pair_statistics import DECAY_UNIT, HOUR, PER_USER, View

# Where a source flag is a feature. `misses` and `lookup_misses` are not: they say what this pipeline computed, not what
# the user does, and would make the model depend on its own earlier choices.
FLAGGED = ("recent", "cooccurrence", "rising", "cluster_rising", "new_items")
FEW_REQUESTS = 5  # of a user, by which what is known of the hours of their day is weakened

FEATURES: tuple[str, ...] = (
    # the pair
    "rows_1h",
    "rows_6h",
    "rows_24h",
    "rows",
    "decayed",
    "decayed_slow",
    "shown_24h",
    "shown",
    "clicked",
    "hours_since_last",
    "hours_since_first",
    "requests_since_last",
    "requests_since_first",
    "share_since_first",
    "seen",
    # the user
    "requests_1h",
    "requests_6h",
    "requests_24h",
    "requests_per_day",
    "expected_requests",
    "day_cos_1",
    "day_sin_1",
    "day_cos_2",
    "day_sin_2",
    "hours_since_request",
    "user_hours",
    "rows_per_request",
    "pairs_24h",
    "repeats_24h",
    "renewed_24h",
    "renewed_6h",
    # the item
    "item_rows_1h",
    "item_rows_6h",
    "item_rows_24h",
    "item_rows_per_day",
    "item_velocity",
    "item_hours_since_last",
    "item_age_hours",
    "item_age_known",
    # the user and items like this one
    "category_share",
    "advertiser_share",
    *(f"from_{source}" for source in FLAGGED),
)


def features(view: View, pairs: DataFrame) -> DataFrame:
    """Adds FEATURES (DOUBLE) to candidates (at, user_id, item_id, sources), one row out for each row in."""

    def shares(kind: str) -> Column:
        return F.map_from_entries(F.collect_list(F.when(F.col("kind") == kind, F.struct("key", "share"))))

    tastes = view.tastes.groupBy(*PER_USER).agg(
        shares("category").alias("category_shares"), shares("advertiser").alias("advertiser_shares")
    )
    joined = (
        pairs.join(view.pairs, [*PER_USER, "item_id"], "left")
        .join(view.users, [*PER_USER], "left")
        .join(tastes, [*PER_USER], "left")
        .join(view.item_counts, ["at", "item_id"], "left")
        .join(view.items, "item_id", "left")
    )
    return joined.select(
        *PER_USER,
        "item_id",
        "sources",
        *(
            F.coalesce(expression.cast("double"), F.lit(0.0)).alias(name)
            for name, expression in _expressions(view).items()
        ),
    )


def _expressions(view: View) -> dict[str, Column]:
    lookback = F.lit(view.lookback_hours)

    def hours(age: str) -> Column:
        return F.coalesce(F.col(age) / F.lit(float(HOUR)), lookback)

    def requests_since(bucket: str) -> Column:
        """Requests of the user after the one in that bucket; all of them if the pair was never seen."""
        place = F.array_position("buckets", F.col(bucket))
        return F.coalesce(F.get("before", (place - 1).cast("int")), F.col("requests"))

    def known(column: str) -> Column:
        return F.coalesce(F.col(column), F.lit(0))

    windows_per_day = 24 / view.window_hours
    # At least a day: hours of log do not say how often a user comes in a day.
    days = F.greatest(F.lit(1.0), F.coalesce(F.col("user_first_age"), F.lit(0)) / (24.0 * HOUR))
    created_hours = (F.col("at") - F.col("created")) / F.lit(float(HOUR))
    counted = {
        name: known(name) for name in ("rows_1h", "rows_6h", "rows_24h", "rows", "shown_24h", "shown", "clicked")
    }
    found = {
        **counted,
        "decayed": known("decayed") / DECAY_UNIT,
        "decayed_slow": known("decayed_slow") / DECAY_UNIT,
        "hours_since_last": hours("last_age"),
        "hours_since_first": hours("first_age"),
        "requests_since_last": requests_since("last_bucket"),
        "requests_since_first": requests_since("first_bucket"),
        # Of the requests since the pair first came up, how many it was in: what a set of live campaigns looks like.
        "share_since_first": known("rows") / (requests_since("first_bucket") + 1),
        "seen": F.col("rows").isNotNull().cast("int"),
        "requests_1h": known("requests_1h"),
        "requests_6h": known("requests_6h"),
        "requests_24h": known("requests_24h"),
        "requests_per_day": known("requests") / days,
        # What the coming window's hours of the day brought on the days before.
        "expected_requests": known("requests_profile") / days * max(1.0, 1 / windows_per_day),
        # The user's day against the coming window, drawn to 0 where requests are few.
        **{
            f"day_{name}": known(name) / DECAY_UNIT / (known("requests") + FEW_REQUESTS)
            for name in ("cos_1", "sin_1", "cos_2", "sin_2")
        },
        "hours_since_request": F.coalesce(F.col("user_last_bucket") / 6.0, lookback),
        "user_hours": hours("user_first_age"),
        "rows_per_request": known("user_rows") / F.greatest(known("requests"), F.lit(1)),
        "pairs_24h": known("pairs_24h"),
        "repeats_24h": known("user_rows_24h") / F.greatest(known("pairs_24h"), F.lit(1)),
        # How many of the user's latest pairs were new: when their campaigns change, all of them do.
        "renewed_24h": known("new_pairs_24h") / F.greatest(known("pairs_24h"), F.lit(1)),
        "renewed_6h": known("new_pairs_6h") / F.greatest(known("pairs_6h"), F.lit(1)),
        "item_rows_1h": known("item_rows_1h"),
        "item_rows_6h": known("item_rows_6h"),
        "item_rows_24h": known("item_rows_24h"),
        "item_rows_per_day": known("item_rows") / (view.lookback_hours / 24),
        "item_velocity": (known("item_rows_6h") * 4 + 1) / (known("item_rows_24h") + 1),
        "item_hours_since_last": hours("item_last_age"),
        "item_age_hours": F.when(created_hours > 0, created_hours).otherwise(hours("item_first_age")),
        "item_age_known": F.coalesce(created_hours > 0, F.lit(False)).cast("int"),
        "category_share": F.try_element_at("category_shares", F.col("category_id")),
        "advertiser_share": F.try_element_at("advertiser_shares", F.col("advertiser_id")),
        **{f"from_{source}": F.array_contains("sources", source).cast("int") for source in FLAGGED},
    }
    return {name: found[name] for name in FEATURES}
