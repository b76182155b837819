"""What each budget would have covered in a past window: by the verifier, by simple rules, and with hindsight."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from jobs.common.candidates import CandidateSettings, candidates, horizon_of
from jobs.common.clock import slice_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.log import log_between
from jobs.common.pair_features import features
from jobs.common.pair_scores import foundation_at, scored, verifier_at
from jobs.common.pair_statistics import HASH_RANGE, open_view
from jobs.common.selection import Limits, with_density
from jobs.common.tables import Tables
from solaris_udf.selection import UNIT_COSTS, Costs

PAIR = ("user_id", "item_id")
# What a rule says of a candidate; more is better, and 0 is never bought.
RULES: dict[str, str] = {
    "verifier": "expected_rows",
    "frequency": "decayed",
    "recency": "1 / (1 + hours_since_last)",
    "popularity": "item_rows_24h",
    "random": f"(pmod(xxhash64(user_id, item_id), {HASH_RANGE}) + 1) / {HASH_RANGE}",
    "hindsight": "double(rows)",
}


@dataclass(frozen=True)
class Curve:
    """A rule's curve: points (cost as a share of all candidates' cost, rows covered for it), both ascending."""

    rule: str
    points: tuple[tuple[float, float], ...]

    def rows_at(self, share: float) -> float:
        """Covered rows for a share of the cost, linear between the points."""
        before = (0.0, 0.0)
        for point in self.points:
            if point[0] >= share:
                part = (share - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        return before[1]


@dataclass(frozen=True)
class Budgets:
    """The curves of the window that begins at as_of. rows: all its scored rows; taken: what the run itself chose, as
    (share of the cost, covered rows), None where candidate_pairs has no such slice."""

    as_of: datetime
    candidates: int
    rows: int
    verifier_used: bool
    curves: tuple[Curve, ...]
    taken: tuple[float, int] | None


def budget_curves(
    spark: SparkSession, config: Config, settings: CandidateSettings, as_of: datetime, flops: bool
) -> Budgets:
    """Makes the candidates of that time again, and counts what each rule's choice would have covered by the window's
    end, nothing having been embedded before.

    The driver sees some thousand counts a rule. flops: a user's first pair also pays for the user. Raises UserError
    if the window has no candidates or no scored rows.
    """
    tables = Tables(spark, config.path("tables"))
    hours = config.window.hours
    end = as_of + timedelta(hours=hours)
    costs = foundation_at(config, as_of).costs if flops else UNIT_COSTS
    verifier = verifier_at(config, as_of)
    happened = log_between(tables, as_of, end, end).groupBy(*PAIR).agg(F.count("*").alias("rows"))
    with open_view(tables, [as_of], horizon_of(config, settings), as_of) as view:
        described = features(view, candidates(view, settings)).persist()
        guesses = scored(described, verifier, hours, settings.half_life_hours).drop("sources")
        pairs = (
            described.select(*PAIR, "decayed", "hours_since_last", "item_rows_24h")
            .join(guesses, [*PAIR], "inner")
            .join(happened, [*PAIR], "left")
            .fillna(0, ["rows"])
            .repartition("user_id")
            .persist()
        )
        try:
            totals = pairs.agg(F.count("*").alias("pairs"), F.count_distinct("user_id").alias("users")).first()
            rows = happened.agg(F.coalesce(F.sum("rows"), F.lit(0)).alias("rows")).first()
            assert totals is not None and rows is not None
            if not totals.pairs or not rows["rows"]:
                raise UserError(
                    f"slice {slice_of(as_of)} has {totals.pairs} candidates and its window {rows['rows']} scored rows "
                    f"in the log; choose a slice with --at whose window is over and ingested"
                )
            full = costs.total(totals.users, totals.pairs)
            curves = tuple(_curve(rule, pairs, costs, full) for rule in RULES)
            taken = _taken(tables, pairs, as_of, costs, full)
        finally:
            pairs.unpersist()
            described.unpersist()
    return Budgets(as_of, totals.pairs, rows["rows"], verifier is not None, curves, taken)


def _curve(rule: str, pairs: DataFrame, costs: Costs, full: float) -> Curve:
    """Pairs, first pairs and rows by density bucket, densest first: at most BUCKETS rows."""
    valued = pairs.select(
        *PAIR,
        "rows",
        F.lit(1.0).alias("probability"),
        F.expr(RULES[rule]).alias("expected_rows"),
        F.lit(False).alias("fresh"),
    )
    buckets = (
        with_density(valued, costs, Limits())
        .where("bucket IS NOT NULL")
        .groupBy("bucket")
        .agg(F.count("*").alias("pairs"), F.count_if(F.col("rank") == 1).alias("firsts"), F.sum("rows").alias("rows"))
        .collect()
    )
    points, spent, covered = [], 0.0, 0.0
    for bucket in sorted(buckets, key=lambda row: row.bucket):
        spent += costs.total(bucket.firsts, bucket.pairs) / full
        covered += bucket["rows"]
        points.append((spent, covered))
    return Curve(rule, tuple(points))


def _taken(tables: Tables, pairs: DataFrame, as_of: datetime, costs: Costs, full: float) -> tuple[float, int] | None:
    """What the run of that time chose, reused pairs included: what the choice would have cost anew, and its rows."""
    chosen = tables.read_slice("candidate_pairs", as_of).select(*PAIR)
    found = (
        pairs.join(chosen, [*PAIR], "left_semi")
        .agg(F.count("*").alias("pairs"), F.count_distinct("user_id").alias("users"), F.sum("rows").alias("rows"))
        .first()
    )
    assert found is not None
    return (costs.total(found.users, found.pairs) / full, found["rows"]) if found.pairs else None
