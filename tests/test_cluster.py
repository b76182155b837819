"""A slice by spark-submit on a real standalone cluster on loopback, and the loss of machines in the middle of it."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jobs.common.config import load_config
from jobs.common.tables import Tables
from scripts.build_dist import build_zip
from tests.application import Application
from tests.standalone import Cluster, cluster_properties, finish, spark_submit
from tests.test_pipeline import SMALL, assert_same_first_slice

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
    "find_neighbors",
    "audit_coverage",
    "export_snapshot",
]
WRITTEN = ("pair_embeddings", "user_embeddings", "user_neighbors", "user_clusters", "coverage_audit", "snapshots")
# More tasks than cores, so that there is a middle. Here and on the cluster: a snapshot's files are those of its shards.
SEVERAL_TASKS = ["embed_pairs.task_pairs=100", "export_snapshot.shards=8"]
# They lose a machine amid what Spark's plans call the step that runs the model, and the one that writes the shards.
STEP = "MapInArrow"
LOSING = ("embed_pairs", "export_snapshot")

pytestmark = [pytest.mark.long, pytest.mark.e2e]


def settings(root):
    return [f"--set={setting}" for setting in (f"storage.root={root}", *SMALL, *SEVERAL_TASKS)]


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


def lose_a_machine_amid(operator, application, cluster, running):
    """Kills a worker, its executor and its Python workers while tasks of the operator run on it.

    They are halted first: what Spark still calls running then was not over before it was killed.
    """
    deadline = time.monotonic() + 600
    while running.poll() is None and time.monotonic() < deadline:
        for task, executor in application.running_tasks(operator):
            machine = cluster.machine_of(executor)
            for process in machine:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            lost = machine and (task, executor) in application.running_tasks(operator)
            for process in machine:
                with suppress(psutil.NoSuchProcess):
                    process.kill() if lost else process.resume()
            if lost:
                return
        time.sleep(0.1)
    running.kill()
    raise AssertionError(f"no task of {operator} was seen at work: {running.communicate()[0][-3000:]}")


def test_a_slice_on_a_cluster_that_loses_machines_gives_the_rows_of_one_on_this_machine(
    spark, expected, cluster, tmp_path
):
    """Each job by spark-submit; a worker with its executor is killed amid inference and amid the write of shards."""
    root = tmp_path / "solaris"
    for part in ("raw", "models"):
        shutil.copytree(expected / part, root / part)
    options = ("--py-files", str(build_zip(tmp_path / "solaris.zip")))
    for job in SLICE:
        application = Application(tmp_path / job)
        file = cluster_properties(cluster, tmp_path / f"{job}.conf", **application.properties())
        running = spark_submit(
            file, job, "--as-of", AS_OF, *settings(root), options=options, environ={**cluster.environ, **QUICK}
        )
        if job in LOSING:
            lose_a_machine_amid(STEP, application, cluster, running)
            cluster.workers.append(cluster.add_worker())
        finish(running)
        lost, again = application.lost_tasks(STEP)
        assert bool(lost) == (job in LOSING) and again == lost, f"{job}: lost {lost}, of which again {again}"
    config = load_config(overrides=[f"storage.root={expected}", *SMALL], environ={})
    tables = Tables(spark, config.path("tables"))
    assert not [name for name in WRITTEN if tables.read(name).isEmpty()]
    assert_same_first_slice(spark, config, root)
