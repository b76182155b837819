"""A slice by spark-submit on a real standalone cluster on loopback, and the loss of machines in the middle of it."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from jobs.common.clock import slice_of
from jobs.common.config import load_config
from scripts.build_dist import build_zip
from tests.processes import until
from tests.standalone import Cluster, cluster_properties, finish, spark_submit
from tests.test_pipeline import SMALL, assert_same, contents

PROJECT = Path(__file__).parents[1]
WORLD_END, AS_OF = "2026-01-05T00:00:00Z", "2026-01-03T12:00:00Z"
# The JVMs here have little data and much to compile: the quick compiler is the better one.
QUICK = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}
SLICE = [
    "ingest_log",
    "update_histories",
    "predict_pairs",
    "embed_pairs",
    "aggregate_users",
    "audit_coverage",
    "export_snapshot",
]
COMPARED = (
    "ranking_log",
    "user_histories",
    "candidate_pairs",
    "pair_embeddings",
    "user_embeddings",
    "coverage_audit",
    "snapshots",
)

pytestmark = [pytest.mark.long, pytest.mark.e2e]


def settings(root):
    return [f"--set={setting}" for setting in (f"storage.root={root}", *SMALL)]


def on_this_machine(root, *command):
    subprocess.run(
        [sys.executable, "-m", *command, *settings(root)], check=True, cwd=PROJECT, env={**os.environ, **QUICK}
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A storage root with a world, a model and one slice, all by processes of this machine."""
    root = tmp_path_factory.mktemp("local") / "solaris"
    on_this_machine(root, "jobs.make_world", "--as-of", WORLD_END)
    jobs = [*SLICE[:2], "train_foundation", *SLICE[2:]]
    on_this_machine(root, "jobs", "run", "--from", AS_OF, *(f"--job={job}" for job in jobs))
    return root


@pytest.fixture
def cluster(tmp_path):
    found = Cluster(tmp_path)
    yield found
    found.stop()


def lose_a_busy_machine(cluster, running):
    until(lambda: cluster.busy_worker() or running.poll() is not None, "no Python worker was started", 600)
    found = cluster.busy_worker()
    assert found and running.poll() is None, "the job was over before the machine was lost"
    worker, below = found
    for process in (psutil.Process(worker.pid), *below):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_slice_on_a_cluster_that_loses_machines_gives_the_rows_of_one_on_this_machine(
    spark, expected, cluster, tmp_path
):
    """Each job by spark-submit; a worker with its executor is killed amid embed_pairs and amid export_snapshot."""
    root = tmp_path / "solaris"
    for part in ("raw", "models"):
        shutil.copytree(expected / part, root / part)
    file = cluster_properties(cluster, tmp_path / "standalone.conf")
    options = ("--py-files", str(build_zip(tmp_path / "solaris.zip")))
    for job in SLICE:
        running = spark_submit(
            file, job, "--as-of", AS_OF, *settings(root), options=options, environ={**cluster.environ, **QUICK}
        )
        if job in ("embed_pairs", "export_snapshot"):
            lose_a_busy_machine(cluster, running)
            cluster.workers.append(cluster.add_worker())
        finish(running)
    name = slice_of(datetime.fromisoformat(AS_OF))
    mine, other = (load_config(overrides=[f"storage.root={place}", *SMALL], environ={}) for place in (expected, root))
    for table in COMPARED:
        assert_same(table, contents(spark, mine, table, name), contents(spark, other, table, name))
