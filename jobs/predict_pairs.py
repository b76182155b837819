"""Guesses which pairs the ranker will score in [as_of, as_of + window), and chooses those worth their cost.

Candidates come from a few bounded sources, the verifier says how likely and how often each will be scored, and the
selection takes the most expected rows that the budget buys. Pairs whose embedding stays fresh through the window are
reused at no cost. Reads ranking_log, items and pair_embeddings as of as_of, the latest verifier (without one: decayed
frequency) and the costs of the latest foundation model; writes candidate_pairs and score_histogram.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.candidates import CandidateSettings, candidates, horizon_of
from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from jobs.common.log import fresh_pair_embeddings
from jobs.common.main import main
from jobs.common.models import latest_model
from jobs.common.pair_features import FEATURES, features
from jobs.common.pair_statistics import open_view
from jobs.common.runs import Report, Run
from jobs.common.selection import Limits, Supply, choose, supply_of, with_density
from solaris_udf.selection import UNIT_COSTS, Costs
from solaris_udf.verifier import Verifier, VerifierError, load

log = logging.getLogger("solaris")
SCORED = "user_id BIGINT, item_id BIGINT, sources ARRAY<STRING>, probability DOUBLE, expected_rows DOUBLE"
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
    max_pairs_per_user: int = Field(0, ge=0, description="Computed pairs a user at most; 0: no limit")
    max_users_per_item: int = Field(0, ge=0, description="Users an item is computed for at most; 0: no limit")


@dataclass(frozen=True)
class Foundation:
    """What the choice needs to know of the foundation model. Without one: unit costs, and nothing to reuse."""

    costs: Costs = UNIT_COSTS
    version: str | None = None


def foundation_at(run: Run) -> Foundation:
    """The foundation model that embed_pairs will use."""
    folder = latest_model(run.config, "foundation", run.as_of)
    if folder is None:
        return Foundation()
    from solaris_udf.foundation.contract import load_description

    found = load_description(folder)
    return Foundation(Costs(float(found.flops_per_user), float(found.flops_per_pair)), found.version)


def verifier_at(run: Run) -> Verifier | None:
    """The verifier of this time. Raises UserError if it is broken or was trained on other features."""
    folder = latest_model(run.config, "verifier", run.as_of)
    if folder is None:
        return None
    try:
        verifier = load(folder)
        verifier.check(FEATURES, run.config.window.hours)
    except VerifierError as error:
        raise UserError(f"{folder.name}: {error}") from None
    return verifier


def score(described: DataFrame, verifier: Verifier) -> DataFrame:
    """Probability and expected rows of candidates with their features.

    The verifier travels with the task: it is tens of kilobytes, so executors need no access to the model's folder.
    """

    def batches(source: Iterator[Any]) -> Iterator[Any]:
        import numpy as np
        import pyarrow as pa

        for batch in source:
            values = np.column_stack([batch.column(name).to_numpy(zero_copy_only=False) for name in verifier.features])
            probability, expected = verifier.predict(values)
            yield pa.RecordBatch.from_arrays(
                [
                    batch.column("user_id"),
                    batch.column("item_id"),
                    batch.column("sources"),
                    pa.array(probability),
                    pa.array(expected),
                ],
                names=["user_id", "item_id", "sources", "probability", "expected_rows"],
            )

    return described.select("user_id", "item_id", "sources", *verifier.features).mapInArrow(batches, SCORED)


def score_by_frequency(described: DataFrame, window_hours: float, half_life_hours: float) -> DataFrame:
    """The rule before any verifier is trained; pairs never seen get 0.

    A pair with a steady rate of r rows an hour has a decayed count of r * half-life / ln 2. So expected rows =
    decayed * ln 2 / half-life * window, and probability = 1 - e^-expected (Poisson).
    """
    expected = F.round(F.col("decayed") * (math.log(2) / half_life_hours * window_hours), 9)
    return described.select(
        "user_id",
        "item_id",
        "sources",
        F.round(1 - F.exp(-expected), 9).alias("probability"),
        expected.alias("expected_rows"),
    )


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
    window = run.config.window.hours
    foundation, verifier = foundation_at(run), verifier_at(run)
    costs = foundation.costs if settings.budget_unit == "flops" else UNIT_COSTS
    limits = Limits(settings.min_probability, settings.max_pairs_per_user, settings.max_users_per_item)
    with open_view(run.tables, [run.as_of], horizon_of(run.config, settings), run.as_of) as view:
        described = features(view, candidates(view, settings))
        scored = (
            score_by_frequency(described, window, settings.half_life_hours)
            if verifier is None
            else score(described, verifier)
        )
        known = scored.join(fresh_pairs(run, foundation.version), ["user_id", "item_id"], "left")
        ranked = with_density(known.withColumn("fresh", F.coalesce("fresh", F.lit(False))), costs, limits).persist()
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
