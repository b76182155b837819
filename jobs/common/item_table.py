"""The item table as one Arrow file that the workers of a foundation model map into memory."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import functions as F

from jobs.common.config import on_disk
from jobs.common.errors import UserError
from jobs.common.log import items_at
from jobs.common.runs import Run
from solaris_udf.foundation.items import ITEM_SCHEMA, write_item_file


def write_item_table(run: Run) -> Path:
    """Writes the items known at the run's as_of to staging/items/<slice>/items.arrow and returns the path.

    Written again by each job that needs it (it is small beside the log), atomically, so that workers which still map an
    older file keep it. Spark writes the rows to disk; this process holds one item table, not the log.

    Raises UserError if items have feature vectors of different lengths.
    """
    folder = Path(run.config.path("staging", "items", run.slice))
    rows = folder / f"rows-{run.run_id}"
    columns = [F.col(field.name) for field in ITEM_SCHEMA]
    items_at(run.tables, run.as_of).select(*columns).write.mode("overwrite").parquet(on_disk(rows))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from ds.dataset(str(rows), format="parquet", schema=ITEM_SCHEMA).to_batches()

    path = folder / "items.arrow"
    try:
        write_item_file(batches(), path)
    except ValueError as error:
        raise UserError(f"table items at {run.slice}: {error}") from None
    finally:
        shutil.rmtree(rows, ignore_errors=True)
    return path
