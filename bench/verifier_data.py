"""The logs that bench/verifier.py judges on, and what the pipeline's own code makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.common.candidates import candidate_settings, candidates, horizon_of
from jobs.common.clock import from_micros, micros
from jobs.common.config import Config, load_config
from jobs.common.demo import fetch_movielens
from jobs.common.log import log_before
from jobs.common.models import require_model
from jobs.common.pair_features import features
from jobs.common.pair_statistics import open_view
from jobs.common.runs import execute
from jobs.common.session import PROJECT
from jobs.train_verifier import labels
from solaris_udf.verifier import Verifier, load

PAIR = ["user_id", "item_id"]


@dataclass(frozen=True)
class Log:
    """A log to judge on: its config, and the days whose windows are the test."""

    config_file: str
    first: datetime  # the first test window begins
    days: int


LOGS = {
    "world": Log("demo.toml", datetime(2026, 1, 5, tzinfo=UTC), 2),
    "movielens-100k": Log("movielens-100k.toml", datetime(1998, 3, 30, tzinfo=UTC), 2),
}


@dataclass(frozen=True)
class TestWindow:
    """One test window as predict_pairs sees it at its start, and what then happened.

    candidates: user_id, item_id and the features; probability and expected_rows by the verifier of that time.
    happened: user_id, item_id, rows of every pair that was scored in the window, a candidate or not.
    """

    start: datetime
    candidates: pd.DataFrame
    happened: pd.DataFrame

    def rows_of(self, pairs: pd.DataFrame) -> npt.NDArray[np.float64]:
        """How many rows each of the pairs had in the window [n]."""
        found = pairs[PAIR].merge(self.happened, on=PAIR, how="left")["rows"]
        return found.fillna(0.0).to_numpy(dtype=np.float64)


def config_of(name: str, cache: Path) -> Config:
    """The demo's config, with a storage root of the benchmark's own."""
    return load_config([PROJECT / "conf" / LOGS[name].config_file], [f"storage.root={cache / name}"])


def test_starts(name: str, hours: float) -> list[datetime]:
    """When the test windows begin."""
    log = LOGS[name]
    return [log.first + timedelta(hours=hours * place) for place in range(round(24 * log.days / hours))]


def prepare(spark: SparkSession, config: Config, name: str) -> None:
    """Makes the log and ingests it, once per cache folder; the marker file is written last."""
    log, done = LOGS[name], Path(config.path("ingested"))
    if done.exists():
        return
    end = log.first + timedelta(days=log.days)
    if name == "world":
        execute("make_world", spark, config, end)
    else:
        fetch_movielens(Path(config.path("raw", "ml-100k")))
    for day in range(log.days + 1):
        execute("ingest_log", spark, config, log.first + timedelta(days=day))
    done.touch()


def train(spark: SparkSession, config: Config, name: str) -> None:
    """Trains the verifier at the start of each test day, as the pipeline does."""
    for day in range(LOGS[name].days):
        execute("train_verifier", spark, config, LOGS[name].first + timedelta(days=day))


def test_windows(spark: SparkSession, config: Config, starts: Sequence[datetime], end: datetime) -> list[TestWindow]:
    """The candidates of each window, scored by the verifier in force, and what happened in it, as known at `end`.

    The windows of a demo have some 66,000 candidates each; a benchmark may hold them.
    """
    from jobs.common.runs import Run

    tables = Run("bench", spark, config, end, "bench").tables
    settings, hours = candidate_settings(config), config.window.hours
    with open_view(tables, starts, horizon_of(config, settings), end) as view:
        described = features(view, candidates(view, settings)).drop("sources").toPandas()
    span = (end - min(starts)) / timedelta(hours=1)
    happened = labels(log_before(tables, end, span), micros(end), hours).toPandas().rename(columns={"label": "rows"})
    windows = []
    for start in starts:
        of_window = described[described["at"] == micros(start)].drop(columns="at").sort_values(PAIR, ignore_index=True)
        scored(of_window, load(require_model(config, "verifier", start)))
        after = happened[happened["at"] == micros(start)].drop(columns="at").reset_index(drop=True)
        windows.append(TestWindow(from_micros(micros(start)), of_window, after))
    return windows


def rows_before(spark: SparkSession, config: Config, end: datetime) -> pd.DataFrame:
    """All scored rows known at `end`: user_id, item_id, request_id, event and arrival (microseconds)."""
    from jobs.common.runs import Run

    rows = log_before(Run("bench", spark, config, end, "bench").tables, end, 24 * 30)
    return rows.select(
        *PAIR,
        "request_id",
        F.unix_micros("event_time").alias("event"),
        F.unix_micros("arrived_at").alias("arrival"),
    ).toPandas()


def scored(frame: pd.DataFrame, verifier: Verifier) -> None:
    """Adds probability and expected_rows to candidates with their features."""
    frame["probability"], frame["expected_rows"] = verifier.predict(frame[list(verifier.features)].to_numpy())
