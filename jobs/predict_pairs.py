"""Guesses which pairs the ranker will score in [as_of, as_of + window), and chooses those worth their cost.

Candidates come from a few bounded sources, the verifier says how likely and how often each will be scored, and the
selection takes the most expected rows that the budget buys. Pairs whose embedding stays fresh through the window are
reused at no cost. Reads ranking_log, items and pair_embeddings as of as_of, the latest verifier (without one: decayed
frequency) and the costs of the latest foundation model; writes candidate_pairs and score_histogram.
"""

import logging
from typing import Literal

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.candidates import CandidateSettings, candidates, horizon_of
from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from jobs.common.log import fresh_pair_embeddings
from jobs.common.main import main
from jobs.common.pair_features import features
from jobs.common.pair_scores import Foundation, foundation_at, scored, verifier_at
from jobs.common.pair_statistics import open_view
from jobs.common.runs import Report, Run
from jobs.common.selection import Limits, Supply, choose, supply_of, with_density
from solaris_udf.selection import UNIT_COSTS, Costs

log = logging.getLogger("solaris")
RATE_RUNS = 5  # the latest embed_pairs runs that the measured rate is taken from
MICRO = 1_000_000


class Settings(CandidateSettings):
    """The [predict_pairs] section."""

    section = "predict_pairs"
    budget: float | None = Field(
        None, gt=0, description="What one run may spend, in budget_unit; left out: budget_share"
    )
    budget_unit: Literal["pairs", "flops", "seconds"] = Field(
        "pairs",
        description="pairs: each pair counts 1; flops: a user's first pair also pays for the user; seconds: of "
        "embed_pairs, by the rate that its latest runs measured",
    )
    budget_share: float = Field(0.2, gt=0, le=1, description="Without budget: part of what all candidates would cost")
    min_probability: float = Field(0.001, ge=0, le=1, description="Less likely pairs are not computed")
    mean_worth: float = Field(
        0.1,
        ge=0,
        le=1,
        description="What a row served by its user's mean counts, when a user without a fresh pair competes for a "
        "first one; 0: only rows of the pair itself count",
    )
    max_pairs_per_user: int = Field(0, ge=0, description="Computed pairs a user at most; 0: no limit")
    max_users_per_item: int = Field(0, ge=0, description="Users an item is computed for at most; 0: no limit")


def fresh_pairs(run: Run, version: str | None) -> DataFrame:
    """Pairs whose stored embedding of this model version is within its TTL until the end of the window.

    This run's own slice does not count: a retry must choose what the first try chose.
    """
    hours = run.config.serving.ttl_hours - run.config.window.hours
    if version is None or hours < 0:
        return run.spark.createDataFrame([], "user_id BIGINT, item_id BIGINT, fresh BOOLEAN")
    # An embedding from exactly as_of + window - ttl expires at the window's end, which is outside: still fresh.
    known = fresh_pair_embeddings(run.tables, run.as_of, hours + 1 / 3600, version)
    return known.where(F.col("slice") < run.slice).select("user_id", "item_id", F.lit(True).alias("fresh"))


def budget_of(run: Run, settings: Settings, supply: Supply, costs: Costs) -> float:
    """The budget of this run in the unit of costs."""
    if settings.budget is None:
        users = sum(bucket.firsts for bucket in supply.buckets)
        return settings.budget_share * costs.total(users, supply.candidates)
    if settings.budget_unit == "seconds":
        return settings.budget * measured_rate(run)
    return settings.budget


def measured_rate(run: Run) -> float:
    """Pairs a second of the latest embed_pairs runs before this slice. Raises UserError if there is none."""
    found = (
        run.tables.read("job_runs")
        .where(
            (F.col("job") == "embed_pairs") & (F.col("status") == "succeeded") & (F.col("slice") < slice_of(run.as_of))
        )
        .select(
            "slice",
            "started_at",
            F.coalesce(
                F.try_element_at("metrics", F.lit("pairs_per_second")), F.try_divide("rows_out", "seconds")
            ).alias("rate"),
        )
        .where("rate > 0")
        .orderBy(F.col("slice").desc(), F.col("started_at").desc())
        .limit(RATE_RUNS)
        .collect()
    )
    if not found:
        raise UserError(
            'predict_pairs.budget_unit = "seconds" needs a measured rate, and job_runs has no embed_pairs run '
            'before this slice; run it once with budget_unit = "pairs"'
        )
    return float(sorted(row.rate for row in found)[len(found) // 2])


def histogram(chosen: DataFrame) -> DataFrame:
    """Candidates by probability bucket and action, with whole-millionth sums: at most 303 rows."""
    return chosen.groupBy(F.floor(F.col("probability") * 100 + 1e-7).cast("int").alias("percent"), "action").agg(
        F.count("*").alias("pairs"),
        F.sum(F.round(F.col("expected_rows") * MICRO).cast("bigint")).alias("micro_rows"),
        F.count_if(F.col("rank") == 1).alias("firsts"),
    )


def run(run: Run, settings: Settings) -> Report:
    """Candidates, scores, choice, forecast."""
    foundation, verifier = foundation_at(run.config, run.as_of), verifier_at(run.config, run.as_of)
    costs = foundation.costs if settings.budget_unit == "flops" else UNIT_COSTS
    limits = Limits(settings.min_probability, settings.max_pairs_per_user, settings.max_users_per_item)
    with open_view(run.tables, [run.as_of], horizon_of(run.config, settings), run.as_of) as view:
        guesses = scored(
            features(view, candidates(view, settings)), verifier, view.window_hours, settings.half_life_hours
        )
        known = guesses.join(fresh_pairs(run, foundation.version), ["user_id", "item_id"], "left")
        marked = known.withColumn("fresh", F.coalesce("fresh", F.lit(False)))
        ranked = with_density(marked, costs, limits, settings.mean_worth).persist()
        try:
            return _choose_and_write(run, settings, ranked, costs, foundation, verifier is not None)
        finally:
            ranked.unpersist()


def _choose_and_write(
    run: Run, settings: Settings, ranked: DataFrame, costs: Costs, foundation: Foundation, verifier_used: bool
) -> Report:
    supply = supply_of(ranked)
    # With no candidates there is nothing to buy, and any budget buys it.
    budget = budget_of(run, settings, supply, costs) or 1.0
    choice = choose(ranked, supply, costs, budget)
    flops = foundation.costs
    per_user, per_pair = F.lit(flops.per_user), F.lit(flops.per_pair)
    cost = F.when(
        F.col("action") == "compute", per_pair + F.when(F.col("rank") == 1, per_user).otherwise(0.0)
    ).otherwise(0.0)
    try:
        written = run.write(
            choice.pairs.where(F.col("action") != "skip").select(
                "user_id",
                "item_id",
                "probability",
                "expected_rows",
                "sources",
                F.col("place").alias("rank"),
                cost.alias("cost"),
                "action",
            ),
            "candidate_pairs",
        )
        counted = histogram(choice.pairs).collect()
    finally:
        choice.release()
    rows = [
        (
            row.percent / 100,
            row.action,
            row.pairs,
            row.micro_rows / MICRO,
            0.0 if row.action == "reuse" else flops.total(row.firsts, row.pairs),
        )
        for row in counted
    ]
    run.write(
        run.spark.createDataFrame(
            rows, "bucket DOUBLE, action STRING, pairs BIGINT, expected_rows DOUBLE, cost DOUBLE"
        ),
        "score_histogram",
    )

    def total(column: str, *actions: str) -> float:
        return float(sum(row[column] for row in counted if row.action in actions))

    metrics = {
        "candidates": supply.candidates,
        "eligible": supply.eligible,
        "selected": written,
        "computed": total("pairs", "compute"),
        "reused": total("pairs", "reuse"),
        "expected_rows": total("micro_rows", "compute", "reuse") / MICRO,
        "expected_rows_computed": total("micro_rows", "compute") / MICRO,
        "expected_rows_candidates": supply.expected_rows,
        "marginal_expected_rows": choice.cut.marginal_expected_rows,
        "users": total("firsts", "compute"),
        "cost": sum(row[4] for row in rows if row[1] == "compute"),
        "budget": budget,
        "verifier_used": float(verifier_used),
    }
    if supply.candidates:
        log.info(
            "predict_pairs %s: %s of %s candidates chosen (%.0f reused); they expect %.0f of all %.0f rows, "
            "10%% more budget %.0f more",
            run.slice,
            written,
            supply.candidates,
            metrics["reused"],
            metrics["expected_rows"],
            supply.expected_rows,
            choice.cut.marginal_expected_rows,
        )
    return Report(rows_in=supply.candidates, rows_out=written, metrics=metrics)


if __name__ == "__main__":
    main("predict_pairs")
