"""One Spark session for the whole run, small roots, and rows with defaults."""

import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from jobs.common.config import Config, load_config
from schemas import TABLES

# Small data, as in the demo: the same Spark properties. But a test run is long: the better compiler pays for itself.
DEMO = tomllib.loads((Path(__file__).parents[1] / "conf" / "demo.toml").read_text(encoding="utf-8"))["spark"]["conf"]
CONF = {
    **{key: value.replace("-XX:TieredStopAtLevel=1 ", "") for key, value in DEMO.items()},
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
}


def spark_conf(properties: Mapping[str, str]) -> str:
    """The override that sets these Spark properties and no others."""
    return "spark.conf={" + ", ".join(f'"{key}" = "{value}"' for key, value in properties.items()) + "}"


SESSION = ["spark.master=local[2]", "spark.driver_memory=2g", "spark.shuffle_partitions=2", spark_conf(CONF)]
settings.register_profile("suite", deadline=None)  # how long an example takes says nothing about what is right
settings.load_profile("suite")
AS_OF = datetime(2026, 1, 3, tzinfo=UTC)


def hours(count: float) -> timedelta:
    return timedelta(hours=count)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from jobs.common.session import build_session

    session = build_session(load_config(overrides=SESSION, environ={}), "solaris tests")
    yield session
    session.stop()


# Days that are no 24 hours long, and an offset that is no whole hour. For tests with the fixture zone and an as_of.
IN_ZONES = pytest.mark.parametrize(
    ("zone", "as_of"),
    [
        ("America/Sao_Paulo", "2018-11-04T12:00:00-02:00"),  # clocks went forward: the day has 23 hours
        ("Europe/Berlin", "2026-10-25T12:00:00+01:00"),  # clocks went back: 25 hours
        ("Asia/Kolkata", "2026-01-03T05:30:00+05:30"),
    ],
    indirect=["zone"],
)


@pytest.fixture
def zone(request: pytest.FixtureRequest, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """This process, its JVM and Spark's session in another time zone."""
    zones, name = spark.sparkContext._jvm.java.util.TimeZone, "spark.sql.session.timeZone"
    session, machine = spark.conf.get(name), zones.getDefault()
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        zones.setDefault(zones.getTimeZone(request.param))
        spark.conf.set(name, request.param)
        yield request.param
    time.tzset()
    zones.setDefault(machine)
    spark.conf.set(name, session)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "solaris"


@pytest.fixture
def make_config(root: Path) -> Callable[..., Config]:
    """make_config("serving.ttl_hours=6", ...) -> a config whose storage is this test's own."""

    def make(*overrides: str, files: Sequence[str] = ()) -> Config:
        return load_config(files, [f"storage.root={root}", "spark.shuffle_partitions=2", *overrides], environ={})

    return make


@pytest.fixture
def make_run(spark: Any, make_config: Callable[..., Config]) -> Callable[..., Any]:
    """make_run("embed_pairs", as_of, "serving.ttl_hours=6") -> (Run, Settings) to call a job's `run` with."""
    from jobs.common.clock import slice_of
    from jobs.common.runs import Run, job_module

    def make(job: str, as_of: datetime = AS_OF, *overrides: str) -> tuple[Run, Any]:
        config = make_config(*overrides)
        run = Run(job, spark, config, as_of, f"{slice_of(as_of)}-{job}-{uuid.uuid4().hex[:8]}")
        return run, config.get(job_module(job).Settings)

    return make


@pytest.fixture
def tables(spark: Any, root: Path) -> Any:
    from jobs.common.tables import Tables

    return Tables(spark, f"{root}/tables")


@pytest.fixture
def fill(spark: Any, tables: Any) -> Callable[..., None]:
    """fill("ranking_log", [{...}, ...], as_of): replaces the slice; columns left out take DEFAULTS or null."""
    from pyspark.sql import functions as F

    from jobs.common.clock import slice_of
    from jobs.common.tables import spark_schema

    def write(name: str, rows: Sequence[Mapping[str, Any]], as_of: datetime = AS_OF, **partition: str) -> None:
        table = TABLES[name]
        name_of_slice = slice_of(as_of)
        base = {"slice": name_of_slice, "build": name_of_slice, "as_of": as_of, "run_id": "test"}
        values = [
            tuple({**base, **DEFAULTS.get(name, {}), **row}.get(column) for column in table.column_names)
            for row in rows
        ]
        frame = spark.createDataFrame(values, spark_schema(table))
        if table.partition_by:
            tables.replace(frame, name, **(partition or {"slice": slice_of(as_of)}))
        else:
            tables.append(frame.withColumn("run_id", F.coalesce("run_id", F.lit("test"))), name)

    return write


# What tests rarely care about. A ranking_log row's arrived_at must be given or equals event_time through `log_row`.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ranking_log": {"surface": "feed", "shown": True, "clicked": False},
    "label_events": {"label": "conversion", "value": 1.0},
    "candidate_pairs": {
        "probability": 0.5,
        "expected_rows": 0.5,
        "sources": ["recent"],
        "rank": 1,
        "cost": 1.0,
        "action": "compute",
    },
    "pair_embeddings": {"codec": "float16", "model_version": "m1", "probability": 0.5},
    "user_embeddings": {"codec": "float16", "model_version": "m1", "pair_count": 1},
    "user_neighbors": {"model_version": "m1", "cluster_id": 0},
}


def log_row(user: int, item: int, at: datetime, **more: Any) -> dict[str, Any]:
    """A ranking_log row that arrived when it happened, in a request of its user and time."""
    return {
        "request_id": f"{user}-{at.timestamp():.0f}",
        "event_time": at,
        "arrived_at": at,
        "user_id": user,
        "item_id": item,
        **more,
    }
