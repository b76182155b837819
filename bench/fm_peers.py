"""The peers of bench/fm_inference.py: pyspark's predict_batch_udf for each pair, and Ray Data in its own process."""

import inspect
import os
import subprocess
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

from solaris_udf.foundation.inference import Limits
from solaris_udf.foundation.model import load_model

RAY_ANSWER = "fm_ray: "


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


class RayPeer:
    """bench/fm_ray.py in an interpreter that has Ray; each call embeds all rows and notes Ray's own seconds."""

    def __init__(self, python: str, rows: Path, model_folder: Path, items: Path, limits: Limits) -> None:
        self.seconds: list[float] = []
        here = Path(__file__).parent
        given = (rows, model_folder, items, limits.tokens, limits.pairs, limits.bytes)
        self._process = subprocess.Popen(
            [python, str(here / "fm_ray.py"), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here.parent)},
        )
        self._answer()

    def __call__(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.seconds.append(float(self._answer()))

    def _answer(self) -> str:
        """What fm_ray.py says next; Ray's own lines are passed over."""
        for line in self._process.stdout or ():
            if line.startswith(RAY_ANSWER):
                return line.removeprefix(RAY_ANSWER)
        raise SystemExit(
            f"fm_ray.py ended with status {self._process.wait()}, see above; --ray takes a Python that has ray[data] "
            "and this project's torch, pyarrow, pandas and numpy"
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
