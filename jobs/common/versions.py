"""Which model version is served: versions never mix, and a new one takes over once it covers enough."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.errors import UserError
from jobs.common.log import recent_pair_embeddings
from jobs.common.models import declared, models_until
from jobs.common.runs import Run
from solaris_udf.foundation.contract import Description


def served_model(run: Run) -> Description | None:
    """The foundation model whose embeddings the run aggregates and publishes; None without a model.

    That is the first of models_until whose fresh pairs are at least serving.rollout_share of those of any after it:
    embed_pairs works with the first of all, and what an older one embedded is served meanwhile, until it is too old.
    Raises UserError for a model.json that can't be read.
    """
    models = [declared(run.config, folder) for folder in models_until(run.config, "foundation", run.as_of)]
    if len(models) < 2:
        return models[0] if models else None
    serving = run.config.serving
    fresh = recent_pair_embeddings(run.tables, run.as_of, serving.ttl_hours)
    pairs = {
        row.model_version: row.pairs
        for row in fresh.groupBy("model_version").agg(F.count("*").alias("pairs")).collect()
    }
    for model in models:
        own = pairs.pop(model.version, 0)
        if own >= serving.rollout_share * max(pairs.values(), default=0):
            return model
    return models[0]


def model_version_at(run: Run, rows: DataFrame) -> str | None:
    """The version of the served model; without one (embeddings brought from outside), the only model_version of rows;
    None if rows is empty then.

    Raises UserError if rows holds several versions and there is no model to choose by.
    """
    model = served_model(run)
    if model is not None:
        return model.version
    found = sorted(row.model_version for row in rows.select("model_version").distinct().limit(3).collect())
    if len(found) > 1:
        raise UserError(
            f"embeddings of several model versions ({', '.join(found)}) are in the window and there is no foundation "
            f"model below {run.config.path('models', 'foundation')} to choose by; put the model there, or delete the "
            "other slices"
        )
    return found[0] if found else None
