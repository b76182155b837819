"""Which model version a run works with: versions never mix."""

from datetime import datetime

from pyspark.sql import DataFrame

from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.models import latest_model


def model_version_at(config: Config, as_of: datetime, rows: DataFrame) -> str | None:
    """The version of the newest foundation model at as_of; without one (embeddings brought from outside), the only
    model_version of rows; None if rows is empty then.

    Raises UserError if rows holds several versions and there is no model to choose by.
    """
    folder = latest_model(config, "foundation", as_of)
    if folder is not None:
        from solaris_udf.foundation.contract import load_description

        version: str = load_description(folder).version
        return version
    found = sorted(row.model_version for row in rows.select("model_version").distinct().limit(3).collect())
    if len(found) > 1:
        raise UserError(
            f"embeddings of several model versions ({', '.join(found)}) are in the window and there is no foundation "
            f"model below {config.path('models', 'foundation')} to choose by; put the model there, or delete the other "
            "slices"
        )
    return found[0] if found else None
