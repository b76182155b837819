"""Writing measured figures to vm_evaluations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from jobs.common.runs import Run
from jobs.common.tables import spark_schema
from schemas import TABLES

if TYPE_CHECKING:
    from solaris_udf.uplift import Figure

# (sweep, setting, figure)
Stated = tuple[str, str, "Figure"]
OWN = ("slice", "as_of", "run_id")


def write_figures(run: Run, rows: Sequence[Stated], count: int) -> int:
    """Replaces the figures of this job in this slice; count: the rows that they were measured on, where a figure
    does not say it. Returns how many figures were written.

    The other evaluating job's figures of the slice stay: both write to one table and a slice is replaced whole.
    """
    evaluation = f"{run.job}-{run.slice}-{run.config.hash}"
    values = [
        (
            evaluation,
            run.config.log.dataset,
            sweep,
            setting,
            figure.model,
            figure.feature_set,
            figure.seed,
            figure.metric,
            figure.value,
            figure.ci_low,
            figure.ci_high,
            count if figure.rows is None else figure.rows,
            figure.note,
        )
        for sweep, setting, figure in rows
    ]
    schema = StructType([field for field in spark_schema(TABLES["vm_evaluations"]) if field.name not in OWN])
    ours = run.stamp(run.spark.createDataFrame(values, schema))
    others = run.tables.read_slice("vm_evaluations", run.as_of).where(f"evaluation_id NOT LIKE '{run.job}-%'")
    columns = list(TABLES["vm_evaluations"].column_names)
    run.tables.replace(ours.select(columns).unionByName(others.select(columns)), "vm_evaluations", slice=run.slice)
    return len(values)
