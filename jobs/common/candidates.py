"""Where candidates come from: a bounded number per user and source, never every user with every item.

A source is a function (view, settings, cap) -> frame of at, user_id, item_id, place (1 for its best of the user).
Training and prediction share this code, so a model meets the candidates that it was trained on.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import cast

from pydantic import Field, model_validator
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from jobs.common.clock import micros, slice_of
from jobs.common.config import Config, Section
from jobs.common.log import embedded_pairs
from jobs.common.pair_statistics import DECAY_UNIT, HASH_RANGE, HOUR, PER_USER, Horizon, View, best_per, frequent_first

ITEMS_PER_REQUEST = 30  # of a request that co-occurrence looks at: the pairs of items grow with its square
SEED_ITEMS = 5  # of a user, whose co-occurring items are taken
TOP_TASTES = 3  # categories and advertisers of a user, whose new items are taken
RISING_MIN_ROWS = 5
CLUSTER_DAYS = 3  # find_neighbors is daily; older clusters than this say little
MICROSECOND = timedelta(microseconds=1)


class CandidateSettings(Section):
    """Settings that candidates and their features depend on. They stand in [predict_pairs]; train_verifier reads
    them there.
    """

    sources: dict[str, int] = Field(
        {"recent": 300, "misses": 100, "cooccurrence": 20, "rising": 10, "cluster_rising": 10, "new_items": 10},
        description="Candidate sources and how many pairs a user each may name; the first named are kept first",
    )
    max_candidates_per_user: int = Field(400, ge=1, description="Over all sources")
    lookback_hours: float = Field(168.0, gt=0, description="How far back the log is read")
    recent_hours: float = Field(72.0, gt=0, description="Source recent: pairs scored within this time")
    new_item_hours: float = Field(24.0, gt=0, description="Source new_items: items created within this time")
    miss_log: str = Field(
        "", description="Source lookup_misses: folder or URI of what MissLog of the serving hosts writes"
    )
    cooccurrence_requests: int = Field(5_000, ge=1, description="Source cooccurrence: requests sampled for it")
    cooccurrence_items: int = Field(20, ge=1, description="Source cooccurrence: items kept for each item")
    half_life_hours: float = Field(12.0, gt=0, description="Of the decayed frequency of a pair")
    history_pairs: int = Field(1000, ge=1, description="Pairs of a user that are looked at, the most frequent")

    @model_validator(mode="after")
    def _sources_fit(self) -> "CandidateSettings":
        unknown = [name for name in self.sources if name not in SOURCES]
        if unknown:
            raise ValueError(f"unknown sources {unknown}; known: {', '.join(SOURCES)}")
        if "lookup_misses" in self.sources and not self.miss_log:
            raise ValueError("source lookup_misses reads miss_log, which is not set: give the folder of the misses")
        if not self.sources or min(self.sources.values()) < 1:
            raise ValueError(
                "sources names at least one source, each with a cap of 1 or more; leave out what you don't want"
            )
        if self.recent_hours > self.lookback_hours:
            raise ValueError(f"recent_hours {self.recent_hours} is more than lookback_hours {self.lookback_hours}")
        return self


def horizon_of(config: Config, settings: CandidateSettings) -> Horizon:
    """How far the pipeline looks back, and ahead."""
    return Horizon(
        config.window.hours,
        settings.lookback_hours,
        settings.half_life_hours,
        config.serving.ttl_hours,
        settings.history_pairs,
    )


def candidate_settings(config: Config) -> CandidateSettings:
    """The section [predict_pairs], as far as it concerns candidates."""
    return cast(CandidateSettings, config.sections["predict_pairs"])


def candidates(view: View, settings: CandidateSettings) -> DataFrame:
    """One row per candidate of each reference time: at, user_id, item_id, sources (ARRAY, sorted)."""
    named = [
        SOURCES[name](view, settings, cap).select(
            *PER_USER,
            "item_id",
            F.lit(name).alias("source"),
            (F.lit(place * 1_000_000) + F.col("place")).alias("place"),
        )
        for place, (name, cap) in enumerate(settings.sources.items())
    ]
    # By user first: at most the sum of the caps each, and one shuffle serves both the union and the cap.
    together = reduce(DataFrame.unionByName, named).repartition(*PER_USER)
    merged = together.groupBy(*PER_USER, "item_id").agg(
        F.array_sort(F.collect_set("source")).alias("sources"), F.min("place").alias("place")
    )
    return best_per(merged, PER_USER, [F.col("place"), F.col("item_id")], settings.max_candidates_per_user).select(
        *PER_USER, "item_id", "sources"
    )


def recent(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Pairs that were scored lately, by decayed frequency."""
    pairs = view.pairs.where(F.col("last_age") <= round(settings.recent_hours * HOUR))
    return best_per(pairs, PER_USER, frequent_first(), cap)


def misses(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Pairs that were scored in the last window and had no embedding from an earlier run, by decayed frequency."""
    pairs = view.pairs.where(F.col("rows_window") > 0)
    without = pairs.join(_embedded(view), [*PER_USER, "item_id"], "left_anti")
    return best_per(without, PER_USER, frequent_first(), cap)


def lookup_misses(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Pairs that online lookups missed in the last window, by how often, as the hosts' samples tell (MissLog).

    A folder that does not exist yet has no misses.
    """
    window, times = timedelta(hours=view.window_hours), view.times
    first, last = min(times) - window, max(times)
    missed = F.unix_micros("missed_at")
    seen_from = F.filter(
        F.array(*(F.lit(micros(time)) for time in times)),
        lambda at: (missed < at) & (missed >= at - window // MICROSECOND),
    )
    spark = view.tables.spark
    schema = "user_id BIGINT, item_id BIGINT, missed_at TIMESTAMP, weight DOUBLE, day DATE"
    try:
        rows = spark.read.schema(schema).parquet(settings.miss_log)
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        rows = spark.createDataFrame([], schema)
    counted = (
        rows.where(F.col("day").between(F.lit(first.date()), F.lit(last.date())))
        .select("user_id", "item_id", "weight", missed.alias("missed"), F.explode(seen_from).alias("at"))
        .groupBy(*PER_USER, "item_id")
        .agg(F.sum(F.round(F.col("weight") * DECAY_UNIT).cast("bigint")).alias("weight"), F.max("missed").alias("last"))
    )
    return best_per(counted, PER_USER, [F.col("weight").desc(), F.col("last").desc(), F.col("item_id")], cap)


def _embedded(view: View) -> DataFrame:
    """at, user_id, item_id of the pairs that an embedding within the TTL could have answered when the last window
    began.

    Of any model version: a pair that another version has was foreseen, and this source is for those that were not.
    """
    window, ttl = timedelta(hours=view.window_hours), timedelta(hours=view.ttl_hours)
    computed = F.unix_micros("as_of")
    serves = F.filter(
        F.array(*(F.lit(micros(time - window)) for time in view.times)),
        lambda start: (computed <= start) & (computed > start - ttl // MICROSECOND),
    )
    return (
        embedded_pairs(view.tables, min(view.times) - window - ttl, max(view.times) - window)
        .select("user_id", "item_id", F.explode(serves).alias("start"))
        .select((F.col("start") + window // MICROSECOND).alias("at"), "user_id", "item_id")
    )


def cooccurrence(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Items that are scored in the same requests as the user's most frequent items.

    Counted on a sample of requests, chosen by hash. Each of the user's items adds how often, of the requests it is in,
    the other one is in them too.
    """
    total = view.users.groupBy("at").agg(F.sum("requests").alias("requests"))
    sampled = (
        view.rows.join(F.broadcast(total), "at", "inner")
        .where(
            F.pmod(F.xxhash64("request_id"), F.lit(HASH_RANGE)) / float(HASH_RANGE)
            < F.lit(float(settings.cooccurrence_requests)) / F.col("requests")
        )
        .select("at", "request_id", "item_id")
    )
    # Two equally long requests of a thousand items would make a million pairs: a hash chooses which are looked at.
    in_request = best_per(
        sampled.distinct(), ("at", "request_id"), [F.xxhash64("item_id"), F.col("item_id")], ITEMS_PER_REQUEST
    )
    baskets = in_request.groupBy("at", "request_id").agg(F.collect_list("item_id").alias("basket"))
    counts = (
        baskets.select("at", "basket", F.explode("basket").alias("item_id"))
        .select("at", "item_id", F.explode("basket").alias("other_id"))
        .groupBy("at", "item_id", "other_id")
        .agg(F.count("*").alias("n"))
    )
    of_item = Window.partitionBy("at", "item_id")
    with_itself = F.max(F.when(F.col("item_id") == F.col("other_id"), F.col("n"))).over(of_item)
    weighed = counts.withColumn("weight", F.floor(F.col("n") * DECAY_UNIT / with_itself)).where(
        (F.col("item_id") != F.col("other_id")) & (F.col("n") > 1)
    )
    similar = best_per(
        weighed, ("at", "item_id"), [F.col("weight").desc(), F.col("other_id")], settings.cooccurrence_items
    )
    seeds = best_per(view.pairs, PER_USER, frequent_first(), SEED_ITEMS).select(*PER_USER, "item_id")
    scored = (
        seeds.join(similar.select("at", "item_id", "other_id", "weight"), ["at", "item_id"], "inner")
        .groupBy(*PER_USER, F.col("other_id").alias("item_id"))
        .agg(F.sum("weight").alias("weight"))
    )
    return best_per(scored, PER_USER, [F.col("weight").desc(), F.col("item_id")], cap)


def rising(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Items that were scored more in the last window than the lookback before it led to expect, for every active
    user.
    """
    best = _risen(view.item_counts, ("at",), view, settings, cap)
    return view.users.select(*PER_USER).join(F.broadcast(best), "at", "inner")


def cluster_rising(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """The same among the rows of the user's cluster, as find_neighbors knew it before the reference time."""
    clusters = _clusters(view)
    counts = (
        view.everyone.join(clusters, [*PER_USER], "inner")
        .groupBy("at", "cluster_id", "item_id")
        .agg(
            F.count("*").alias("item_rows"),
            F.count_if(F.col("age") <= round(view.window_hours * HOUR)).alias("item_rows_window"),
        )
    )
    best = _risen(counts, ("at", "cluster_id"), view, settings, cap)
    members = view.users.select(*PER_USER).join(clusters, [*PER_USER], "inner")
    return members.join(best, ["at", "cluster_id"], "inner")


def _risen(counts: DataFrame, group: tuple[str, ...], view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """The items of each group that rose most: group, item_id, place."""
    windows = settings.lookback_hours / view.window_hours
    now = F.col("item_rows_window")
    before = (F.col("item_rows") - now) / F.lit(max(windows - 1, 1.0))
    up = counts.withColumn("rise", now / (before + RISING_MIN_ROWS)).where(
        (now >= RISING_MIN_ROWS) & (F.col("rise") > 1)
    )
    return best_per(up, group, [F.col("rise").desc(), F.col("item_id")], cap).select(*group, "item_id", "place")


def _clusters(view: View) -> DataFrame:
    """at, user_id, cluster_id by the latest build of find_neighbors, of an as_of before each reference time.

    Not of that very time: it runs after predict_pairs, and a retry must see what the first try saw.
    """
    computed = F.unix_micros("as_of")
    seen_from = F.filter(
        F.array(*(F.lit(micros(time)) for time in view.times)),
        lambda at: (computed < at) & (computed >= at - CLUSTER_DAYS * 24 * HOUR),
    )
    known = (
        view.tables.read("user_neighbors")
        .where(
            (F.col("slice") >= slice_of(min(view.times) - timedelta(days=CLUSTER_DAYS)))
            & (F.col("slice") < slice_of(max(view.times)))
        )
        .select("user_id", "cluster_id", "build", computed.alias("computed"), F.explode(seen_from).alias("at"))
    )
    # The clusters of one build have nothing to do with those of another.
    latest = known.groupBy("at").agg(F.max("build").alias("build"))
    of_build = known.join(F.broadcast(latest), ["at", "build"], "inner")
    return of_build.groupBy(*PER_USER).agg(F.max_by("cluster_id", "computed").alias("cluster_id"))


def new_items(view: View, settings: CandidateSettings, cap: int) -> DataFrame:
    """Items created lately in the categories and by the advertisers that the user meets most, newest first."""
    age = F.array(*(F.lit(micros(time)) for time in view.times))
    seen_from = F.filter(
        age, lambda at: (F.col("created") < at) & (F.col("created") >= at - round(settings.new_item_hours * HOUR))
    )
    kinds = F.array(
        F.struct(F.lit("category").alias("kind"), F.col("category_id").alias("key")),
        F.struct(F.lit("advertiser").alias("kind"), F.col("advertiser_id").alias("key")),
    )
    fresh = (
        view.items.select("item_id", "created", kinds.alias("tastes"), F.explode(seen_from).alias("at"))
        .select("at", "item_id", "created", F.explode("tastes").alias("taste"))
        .select("at", "item_id", "created", "taste.*")
        .where("key IS NOT NULL")
    )
    newest = best_per(fresh, ("at", "kind", "key"), [F.col("created").desc(), F.col("item_id")], cap).drop("place")
    named = (
        view.tastes.where(F.col("place") <= TOP_TASTES)
        .select(*PER_USER, "kind", "key")
        .join(newest, ["at", "kind", "key"], "inner")
    )
    either = named.groupBy(*PER_USER, "item_id").agg(F.max("created").alias("created"))
    return best_per(either, PER_USER, [F.col("created").desc(), F.col("item_id")], cap)


SOURCES: dict[str, Callable[[View, CandidateSettings, int], DataFrame]] = {
    "recent": recent,
    "misses": misses,
    "lookup_misses": lookup_misses,
    "cooccurrence": cooccurrence,
    "rising": rising,
    "cluster_rising": cluster_rising,
    "new_items": new_items,
}
