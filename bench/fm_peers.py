"""The peers of bench/fm_inference.py: pyspark's predict_batch_udf for each pair, and Ray Data."""

import importlib.util
import inspect
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fm_data import PAIRS_PER_USER
from fm_loop import PlainLoop
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType

from solaris_udf.foundation.inference import Limits, embed_batches
from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.model import load_model


def drained(frame: DataFrame) -> None:
    """Runs all of it and keeps nothing."""
    frame.write.format("noop").mode("overwrite").save()


def per_pair(spark: SparkSession, loop: PlainLoop, folder: Path, pairs: int) -> Callable[[], None]:
    """predict_batch_udf on so many pairs, each with its user's padded history; rows in Spark's memory."""
    from pyspark.ml.functions import predict_batch_udf

    rows = np.random.default_rng(3).choice(len(loop.keys), pairs, replace=False)
    columns = {name: values[rows // PAIRS_PER_USER] for name, values in loop.users.items()}
    columns |= {name: values[rows] for name, values in loop.items.items()}
    shapes = {name: list(values.shape[1:]) for name, values in columns.items()}

    def arrow(values: np.ndarray) -> pa.Array:
        flat = pa.array(values.astype(np.int8).ravel() if values.dtype == bool else values.ravel())
        if values.ndim == 1:
            return flat
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]).cast(pa.list_(flat.type))

    names, users, items = list(columns), list(loop.users), list(loop.items)
    # A file of its own for each model: Spark would answer from what it holds of the other's.
    file = folder / f"{loop.subject.description.name}-pairs.parquet"
    pq.write_table(pa.table({name: arrow(values) for name, values in columns.items()}), file)
    frame = spark.read.parquet(str(file)).repartition(2).persist()
    frame.count()
    model_folder, masks = str(loop.subject.folder), [name for name in names if columns[name].dtype == bool]

    def make_predict() -> Callable[..., np.ndarray]:
        model = load_model(model_folder, threads=1)

        def predict(*values: np.ndarray) -> np.ndarray:
            given = {name: np.ascontiguousarray(value) for name, value in zip(names, values, strict=True)}
            given |= {name: given[name].astype(bool) for name in masks}
            state = model.encode_users({name: given[name] for name in users})
            index = np.arange(len(values[0]), dtype=np.int64)
            return model.start_pairs(state, index, {name: given[name] for name in items})()[0]

        # pyspark counts the parameters.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        predict.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return predict

    predict = predict_batch_udf(
        make_predict,
        return_type=ArrayType(FloatType()),
        batch_size=512,
        input_tensor_shapes=[shapes[name] or None for name in names],
    )
    return lambda: drained(frame.select(predict(*(F.col(name) for name in names))))


def has_ray() -> bool:
    """Whether Ray Data is installed here."""
    return importlib.util.find_spec("ray") is not None


def ray_seconds(rows: Path, model_folder: Path, items: Path, limits: Limits) -> float:
    """Seconds from the first batch's start to the last one's end: our function in two actors of Ray Data.

    rows: the parquet file of grouped rows that Spark reads too. The actors' start and loading are left out.
    """
    import ray

    class Embed:
        def __init__(self) -> None:
            self.model, self.items = load_model(model_folder, threads=1), ItemTable.open(items)

        def __call__(self, batch: pa.Table) -> pa.Table:
            start = time.monotonic()
            given = batch.combine_chunks().to_batches()
            found = pa.Table.from_batches(list(embed_batches(given, self.model, self.items, limits=limits)))
            count, end = len(found), time.monotonic()
            found = found.append_column("start", pa.array(np.full(count, start)))
            return found.append_column("end", pa.array(np.full(count, end)))

    data = ray.data.read_parquet(str(rows), override_num_blocks=8)
    found = data.map_batches(Embed, concurrency=2, num_cpus=1, batch_format="pyarrow", batch_size=1000)
    start, end = float("inf"), 0.0
    for table in found.iter_batches(batch_size=None, batch_format="pyarrow"):
        start, end = min(start, min(table["start"].to_pylist()[:1])), max(end, max(table["end"].to_pylist()[-1:]))
    return end - start


def start_ray() -> None:
    """A Ray on the loopback address, of three CPUs by name: with two, the actors would leave none to read with."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=1 << 30, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().enable_progress_bars = False
