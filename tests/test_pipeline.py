"""The whole pipeline on a tiny world: every table, every tier, reruns, time zones and partitionings."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, steps
from jobs.common.config import load_config
from jobs.common.console import run_with_progress
from jobs.common.series import SERIES, Entry
from jobs.common.tables import Tables
from schemas import TABLES
from solaris_udf.codec import decode
from solaris_udf.snapshot import SnapshotFollower
from tests.conftest import CONF, SESSION, spark_conf
from tests.object_store import SECRET, credentials, s3_server

PROJECT = Path(__file__).parents[1]
FIRST, LAST, END = (datetime(2026, 1, day, hour, tzinfo=UTC) for day, hour in ((3, 12), (3, 18), (5, 0)))
SMALL = [
    "spark.shuffle_partitions=2",
    "make_world.size=tiny",
    "train_foundation.size=tiny",
    "train_foundation.epochs=1",
    "train_foundation.threads=1",  # with more, the weights' last bits, and so the model's version, vary
    "log.dataset=world",
    "window.hours=6",
]
JOBS_OF_A_SLICE = [*SERIES, Entry("join_features", after=("ingest_log",))]
# Written by wall time or by attempt, not by logical time.
UNSTABLE = {"run_id", "pairs_run", "seconds"}

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run_pipeline(spark, root, *overrides, last=LAST):
    """The world and its slices from FIRST to last, below root. Returns (config, outcomes)."""
    from rich.console import Console

    config = load_config(overrides=[f"storage.root={root}", *SMALL, *overrides], environ={})
    console = Console(quiet=True)
    outcomes = run_with_progress(spark, config, [END], [Entry("make_world")], console)
    outcomes += run_with_progress(spark, config, steps(FIRST, last, 6), JOBS_OF_A_SLICE, console)
    return config, outcomes


@pytest.fixture(scope="module")
def pipeline(spark, tmp_path_factory):
    """Two slices on the tiny world, in this process."""
    return run_pipeline(spark, tmp_path_factory.mktemp("pipeline"))


def contents(spark, config, name, slice_name=None):
    """A table's rows in a canonical order, without what may differ between runs; ids and times exact."""
    frame = Tables(spark, config.path("tables")).read(name)
    if slice_name:
        frame = frame.where(F.col("slice") == slice_name)
    columns = [column.name for column in TABLES[name].columns if column.name not in UNSTABLE]
    order = [
        column for column in (*TABLES[name].key, *columns) if column in columns and column not in ("labels", "metrics")
    ]
    return frame.select(*columns).orderBy(*dict.fromkeys(order)).toArrow()


def assert_same(name, first, second):
    assert first.num_rows == second.num_rows, f"{name}: {first.num_rows} and {second.num_rows} rows"
    for column in first.column_names:
        a, b = first[column], second[column]
        if pa.types.is_floating(a.type):
            np.testing.assert_allclose(a.to_numpy(), b.to_numpy(), rtol=1e-5, atol=1e-6, err_msg=f"{name}.{column}")
        elif pa.types.is_binary(a.type) and "embedding" in column:
            assert a.is_null().equals(b.is_null()), f"{name}.{column}"
            np.testing.assert_allclose(
                decode(a.drop_null()), decode(b.drop_null()), atol=2e-3, err_msg=f"{name}.{column}"
            )
        elif column in ("centroid", "sums"):
            kind = "<f4" if column == "centroid" else "<f8"
            first_ones, others = (np.frombuffer(b"".join(each.to_pylist()), kind) for each in (a, b))
            # A sum is of vectors that differ by a rounding to float16 each.
            np.testing.assert_allclose(first_ones, others, atol=2e-3 if column == "centroid" else 2e-2)
        elif pa.types.is_list(a.type) and name == "user_neighbors":
            for left, right in zip(a.to_pylist(), b.to_pylist(), strict=True):
                assert [n["user_id"] for n in left] == [n["user_id"] for n in right]
                np.testing.assert_allclose([n["similarity"] for n in left], [n["similarity"] for n in right], atol=1e-3)
        else:
            assert a.to_pylist() == b.to_pylist(), f"{name}.{column}"


def test_every_table_has_rows_and_every_job_a_record(spark, pipeline):
    config, outcomes = pipeline
    tables = Tables(spark, config.path("tables"))
    # A world's ids are integers and its items come once: id_map stays empty.
    empty = {name for name in TABLES if tables.read(name).isEmpty()}
    assert empty <= {"id_map", "vm_evaluations"}
    runs = tables.read("job_runs").where("status = 'succeeded'").groupBy("job").count().collect()
    assert {row.job: row["count"] for row in runs} == {
        job: sum(outcome.job == job for outcome in outcomes) for job in {outcome.job for outcome in outcomes}
    }
    assert {row.job for row in runs} == {"make_world", *(entry.job for entry in JOBS_OF_A_SLICE)}


def test_keys_are_unique(spark, pipeline):
    config, _ = pipeline
    for name, table in TABLES.items():
        if table.key:
            rows = Tables(spark, config.path("tables")).read(name)
            assert rows.groupBy(*table.key).count().where("count > 1").isEmpty(), name


def test_nothing_written_at_a_slice_knows_its_future(spark, pipeline):
    config, _ = pipeline
    log = Tables(spark, config.path("tables")).read("ranking_log")
    assert log.where("event_time >= as_of OR arrived_at > as_of").isEmpty()
    assert {row.slice for row in log.select("slice").distinct().collect()} == {
        slice_of(at) for at in steps(FIRST, LAST, 6)
    }


def test_fallbacks_lift_coverage_above_pairs_alone(spark, pipeline):
    config, _ = pipeline
    rows = (
        Tables(spark, config.path("tables"))
        .read("coverage_audit")
        .where("surface = 'all' AND population = 'scored' AND segment = 'all'")
        .where(F.col("slice") == slice_of(LAST))
        .groupBy("tier")
        .agg(F.sum("rows").alias("n"))
        .collect()
    )
    counts = {row.tier: row.n for row in rows}
    total = sum(counts.values())
    assert counts["pair"] > 0
    assert 1 - counts.get("none", 0) / total > counts["pair"] / total


def test_rerunning_a_slice_leaves_every_table_identical(spark, pipeline):
    config, _ = pipeline
    from rich.console import Console

    names = [name for name in TABLES if name != "job_runs"]
    before = {name: contents(spark, config, name) for name in names}
    again = run_with_progress(spark, config, [LAST], JOBS_OF_A_SLICE, Console(quiet=True), force=True)
    assert {outcome.slice for outcome in again} == {slice_of(LAST)}
    for name in names:
        assert_same(name, before[name], contents(spark, config, name))


def test_a_second_call_leaves_out_what_is_done(spark, pipeline):
    config, _ = pipeline
    from rich.console import Console

    assert run_with_progress(spark, config, steps(FIRST, LAST, 6), JOBS_OF_A_SLICE, Console(quiet=True)) == []


def elsewhere(root, *overrides, settings=(), **environ):
    """The first slice by a Python process of its own. Returns what it printed."""
    script = (
        "from tests.test_pipeline import FIRST, run_pipeline\n"
        "from jobs.common.config import load_config\n"
        "from jobs.common.session import build_session\n"
        f"spark = build_session(load_config(overrides={[*SESSION, *settings]!r}, environ={{}}), 'elsewhere')\n"
        f"run_pipeline(spark, {str(root)!r}, *{overrides!r}, last=FIRST)\n"
        "spark.stop()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environ},
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def assert_same_first_slice(spark, config, root):
    other = load_config(overrides=[f"storage.root={root}", *SMALL], environ={})
    for name in TABLES:
        if name not in ("job_runs", "vm_evaluations"):
            assert_same(
                name, contents(spark, config, name, slice_of(FIRST)), contents(spark, other, name, slice_of(FIRST))
            )


def test_neither_time_zone_nor_partitioning_changes_a_row(spark, pipeline, tmp_path):
    """The same slices in a process in Asia/Kolkata with four shuffle partitions instead of two."""
    config, _ = pipeline
    four = "spark.shuffle_partitions=4"
    elsewhere(tmp_path / "kolkata", four, settings=[four], TZ="Asia/Kolkata")
    assert_same_first_slice(spark, config, tmp_path / "kolkata")


@pytest.mark.long
def test_on_an_object_store_the_rows_are_the_same_rankers_follow_and_no_credential_is_told(spark, pipeline, tmp_path):
    """Log and tables on s3a://, models and snapshots on a disk, each snapshot pushed to the bucket for rankers."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[s3]'")
    pytest.importorskip("moto.server", reason="moto is not installed")
    if not list((PROJECT / ".jars" / "s3").glob("*hadoop-aws*")):
        pytest.skip("the jars of s3a:// are not there: make s3")
    config, _ = pipeline
    with s3_server() as url:
        access = boto3.session.Session("AKIAexample", SECRET, region_name="us-east-1")
        bucket = access.resource("s3", endpoint_url=url).create_bucket(Bucket="ads")
        files = f"storage.files={tmp_path / 'files'}"
        default = spark_conf({**CONF, "spark.hadoop.fs.defaultFS": "s3a://ads"})  # as on clusters: not the disk
        told = elsewhere(
            "s3a://ads/solaris",
            *(files, "export_snapshot.push_to=s3://ads/served"),
            settings=["storage.root=s3a://ads/solaris", files, default],
            **credentials(url),
        )
        for found in bucket.objects.filter(Prefix="solaris/tables/"):
            if not found.key.endswith("/"):
                target = tmp_path / found.key
                target.parent.mkdir(parents=True, exist_ok=True)
                bucket.download_file(found.key, str(target))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in credentials(url).items():
                patch.setenv(name, value)
            with SnapshotFollower(tmp_path / "ranker", source="s3://ads/served", poll_seconds=600) as follower:
                served = follower.snapshot.manifest.snapshot_id
    assert_same_first_slice(spark, config, tmp_path / "solaris")
    tables = Tables(spark, str(tmp_path / "solaris" / "tables"))
    assert [row.snapshot_id for row in tables.read("snapshots").collect()] == [served]
    assert not (tmp_path / "files" / "tables").exists()
    records = [str(row) for name in ("job_runs", "rejected_rows") for row in tables.read(name).collect()]
    assert len(records) > len(JOBS_OF_A_SLICE) and not [text for text in [told, *records] if SECRET in text]
