"""Which model version is served: versions never mix, and a new one takes over once it covers enough."""

from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.errors import UserError
from jobs.common.log import recent_pair_embeddings
from jobs.common.models import models_until
from jobs.common.runs import Run


def served_model(run: Run) -> Path | None:
    """The foundation model whose embeddings the run aggregates and publishes; None without a model.

    That is the newest whose fresh pairs are at least serving.rollout_share of those of any older model: embed_pairs
    works with the newest from its first slice on, and what the older one embedded is served meanwhile, until it is too
    old. Raises ModelError for a model.json that can't be read.
    """
    folders = models_until(run.config, "foundation", run.as_of)
    serving = run.config.serving
    if len(folders) < 2:
        return folders[0] if folders else None
    from solaris_udf.foundation.contract import DESCRIPTION_FILE, parse_description

    fresh = recent_pair_embeddings(run.tables, run.as_of, serving.ttl_hours)
    pairs = {
        row.model_version: row.pairs
        for row in fresh.groupBy("model_version").agg(F.count("*").alias("pairs")).collect()
    }
    for folder in folders:
        version = parse_description((folder / DESCRIPTION_FILE).read_bytes(), str(folder)).version
        own = pairs.pop(version, 0)
        if own >= serving.rollout_share * max(pairs.values(), default=0):
            return folder
    return folders[0]


def model_version_at(run: Run, rows: DataFrame) -> str | None:
    """The version of the served model; without one (embeddings brought from outside), the only model_version of rows;
    None if rows is empty then.

    Raises UserError if rows holds several versions and there is no model to choose by.
    """
    folder = served_model(run)
    if folder is not None:
        from solaris_udf.foundation.contract import load_description

        version: str = load_description(folder).version
        return version
    found = sorted(row.model_version for row in rows.select("model_version").distinct().limit(3).collect())
    if len(found) > 1:
        raise UserError(
            f"embeddings of several model versions ({', '.join(found)}) are in the window and there is no foundation "
            f"model below {run.config.path('models', 'foundation')} to choose by; put the model there, or delete the "
            "other slices"
        )
    return found[0] if found else None
