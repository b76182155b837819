"""The models in force at a time, and what the verifier says of candidates: how likely they are, and how many rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.models import declared, latest_model
from jobs.common.pair_features import FEATURES
from solaris_udf.selection import UNIT_COSTS, Costs
from solaris_udf.verifier import Verifier, VerifierError, load

SCORED = "user_id BIGINT, item_id BIGINT, sources ARRAY<STRING>, probability DOUBLE, expected_rows DOUBLE"


@dataclass(frozen=True)
class Foundation:
    """What the choice needs to know of the foundation model. Without one: unit costs, and nothing to reuse."""

    costs: Costs = UNIT_COSTS
    version: str | None = None


def foundation_at(config: Config, as_of: datetime) -> Foundation:
    """The foundation model that embed_pairs will use. Raises UserError if its model.json can't be read."""
    folder = latest_model(config, "foundation", as_of)
    if folder is None:
        return Foundation()
    found = declared(config, folder)
    return Foundation(Costs(float(found.flops_per_user), float(found.flops_per_pair)), found.version)


def verifier_at(config: Config, as_of: datetime) -> Verifier | None:
    """The verifier in force at as_of. Raises UserError if it is broken or was trained on other features."""
    folder = latest_model(config, "verifier", as_of)
    if folder is None:
        return None
    try:
        verifier = load(folder)
        verifier.check(FEATURES, config.window.hours)
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


def scored(described: DataFrame, verifier: Verifier | None, window_hours: float, half_life_hours: float) -> DataFrame:
    """user_id, item_id, sources, probability and expected_rows of candidates with their features."""
    if verifier is None:
        return score_by_frequency(described, window_hours, half_life_hours)
    return score(described, verifier)
