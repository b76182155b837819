"""How embed_pairs calls the model: once a pair, in bounded batches, whoever is killed meanwhile."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

import jobs.embed_pairs as job
from solaris_udf.codec import decode
from solaris_udf.foundation.export import export_split_model
from solaris_udf.foundation.inference import Limits
from solaris_udf.foundation.udf import embed_udf_of
from tests.conftest import AS_OF, hours
from tests.jobs.embed_fakes import HISTORY, batches, computed, fake


def start(root, log, chunks, pairs, *overrides):
    """The exit status of tests/jobs/embed_process.py."""
    command = [sys.executable, "-m", "tests.jobs.embed_process", str(root), str(log), str(chunks), str(pairs)]
    return subprocess.run([*command, *overrides], capture_output=True, timeout=300, check=False).returncode


def assert_rows(tables, pairs):
    """That each of so many pairs stands there once, with its embedding."""
    rows = tables.read("pair_embeddings").collect()
    assert len({(row.user_id, row.item_id) for row in rows}) == len(rows) == pairs
    assert all(decode([bytes(row.embedding)])[0].tolist() == [0, row.item_id % 7, 1] for row in rows)


def test_a_giant_user_is_split_into_rows_that_hold_each_item_once(spark):
    pairs = spark.range(10).select(
        F.lit(1).cast("bigint").alias("user_id"),
        (9 - F.col("id")).alias("item_id"),
        (F.col("id") / 10).alias("probability"),
    )
    histories = spark.createDataFrame(
        [],
        "user_id BIGINT, shown ARRAY<BIGINT>, clicked ARRAY<BIGINT>, "
        "requests BIGINT, scored_rows BIGINT, shown_rows BIGINT, clicked_rows BIGINT",
    )
    rows = sorted((row.item_ids, row.probabilities) for row in job.grouped_by_user(pairs, histories, 2, 4).collect())
    assert rows == [([0, 1, 2, 3], [0.9, 0.8, 0.7, 0.6]), ([4, 5, 6, 7], [0.5, 0.4, 0.3, 0.2]), ([8, 9], [0.1, 0.0])]


@pytest.mark.parametrize(
    ("pairs", "parallel", "tasks"),
    [(1, 2, 2), (100, 2, 2), (101, 2, 4), (150, 2, 4), (1_000, 2, 20), (1_000, 3, 21), (1_001, 1, 21)],
)
def test_tasks_come_in_whole_rounds_of_the_slots(pairs, parallel, tasks):
    assert job.tasks_of(pairs, 50, parallel) == tasks


def test_a_giant_user_goes_through_in_batches_of_bounded_bytes(spark, make_run, fill, tables, with_model):
    fill("user_histories", [{**HISTORY, "user_id": 1, "clicked": [{"item_id": 5, "event_time": AS_OF - hours(1)}]}])
    run, settings = make_run("embed_pairs", AS_OF, "embed_pairs.batch_mb=1")
    pairs = spark.range(200_000).select(F.lit(1).cast("bigint").alias("user_id"), F.col("id").alias("item_id"))
    known = {"action": F.lit("compute"), "probability": F.lit(0.5), "rank": F.col("item_id"), "cost": F.lit(1.0)}
    known |= {"expected_rows": F.lit(0.5), "sources": F.array(F.lit("recent"))}
    run.write(pairs.withColumns(known), "candidate_pairs")
    log = with_model(pair_bytes=1000.0)
    report = job.run(run, settings)
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (200_000, 200_000, 0)
    # 1 MB holds 1,048 pairs of 1,000 bytes.
    assert max(map(len, batches(log))) == 1_048
    assert computed(log) == list(range(200_000))
    stored = tables.read("pair_embeddings").select("item_id", "embedding").orderBy("item_id").toArrow()
    assert np.array_equal(stored["item_id"], np.arange(200_000))
    expected = np.stack([np.ones(200_000), np.arange(200_000) % 7, np.ones(200_000)], axis=1)
    assert np.array_equal(decode(stored["embedding"]), expected)


@pytest.fixture
def embedded(spark, make_run, fill, tmp_path):
    """embedded(users, pairs a user, options of the fake...) -> its log, and the rows it gives in two tasks."""
    fill("items", [{"item_id": 1}])
    items = job.write_item_table(make_run("embed_pairs")[0])

    def use(users, each, **options):
        ids = spark.range(users * each)
        pairs = ids.select(
            (F.col("id") % users).alias("user_id"), F.col("id").alias("item_id"), F.lit(0.5).alias("probability")
        )
        events = "array<struct<item_id:bigint,event_time:timestamp>>"
        none = [F.lit(None).cast(events).alias("shown"), F.lit(None).cast(events).alias("clicked")]
        counts = [F.lit(0).cast("bigint").alias(name) for name in job.COUNTS]
        histories = spark.range(users).select(F.col("id").alias("user_id"), *none, *counts)
        inputs = job.grouped_by_user(pairs, histories, 2, 4).withColumn("at", F.lit(AS_OF))
        model = fake(str(tmp_path), **options)
        return tmp_path, inputs.mapInArrow(embed_udf_of(model, items, limits=Limits(pairs=10)), job.OUTPUT_DDL)

    return use


def test_filters_and_structs_behind_the_model_call_it_once_for_a_pair(embedded):
    log, rows = embedded(3, 10)
    both = rows.withColumn("pair", F.struct("embedding", "reason")).where("item_id >= 20 AND embedding IS NOT NULL")
    assert both.select("pair.embedding", "pair.reason", F.length("embedding")).toArrow().num_rows == 10
    assert computed(log) == list(range(30))


def test_a_limit_behind_the_model_stops_it_and_calls_it_once_for_a_pair(embedded):
    # 1,000 batches of 20 ms: time for Spark to say that it has enough.
    log, rows = embedded(1_000, 10, seconds=0.02)
    assert rows.limit(5).toArrow().num_rows == 5
    found = computed(log)
    assert 5 <= len(found) == len(set(found)) < 5_000


@pytest.mark.slow
def test_after_a_killed_worker_a_rerun_computes_only_what_is_missing(tables, fill, make_run, with_model):
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user in range(12) for item in range(3)])
    log = with_model(killed_after=10)
    run, settings = make_run("embed_pairs", AS_OF, "embed_pairs.chunk_pairs=12")
    with pytest.raises(Exception, match=r"[Pp]ython worker"):
        job.run(run, settings)
    assert tables.read("pair_embeddings").count() == 0
    saved = run.spark.read.parquet(*map(str, Path(run.config.path("staging")).rglob("chunk-*/*.parquet"))).count()
    before = len(computed(log))
    assert saved >= 10
    report = job.run(run, settings)
    assert report.metrics["reused"] == saved and len(computed(log)) == before + 36 - saved
    assert_rows(tables, 36)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_gives_the_rows_of_an_undisturbed_one(tables, fill, root, tmp_path):
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user in range(12) for item in range(3)])
    log = tmp_path / "calls"
    log.mkdir()
    assert start(root, log, 2, 0, "embed_pairs.chunk_pairs=8") == -signal.SIGKILL
    before = len(computed(log))
    assert 0 < before < 36 and tables.read("pair_embeddings").count() == 0
    assert start(root, log, 0, 0, "embed_pairs.chunk_pairs=8") == 0
    assert len(computed(log)) == 36  # nothing twice
    assert_rows(tables, 36)


@pytest.mark.slow
def test_a_task_that_spark_tries_again_after_its_worker_was_killed_changes_nothing(spark, tables, fill, root, tmp_path):
    pairs = [(user, 3 * user + place) for user in range(12) for place in range(3)]
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user, item in pairs])
    log = tmp_path / "calls"
    log.mkdir()
    assert start(root, log, 0, 10, "spark.master=local[2,3]", "embed_pairs.batch_pairs=2") == 0
    assert (log / "killed").exists()
    assert_rows(tables, 36)
    assert tables.read("rejected_rows").isEmpty()
    # Only the killed task's pairs were given to the model again: those of users that one of two tasks has.
    found = computed(log)
    assert set(found) == {item for _, item in pairs} and len(found) > 36
    users = {item // 3 for item in found if found.count(item) == 2}
    parts = spark.range(12).withColumnRenamed("id", "user_id").repartition(2, "user_id")
    tasks = parts.groupBy(F.spark_partition_id().alias("task")).agg(F.collect_set("user_id").alias("users")).collect()
    assert max(map(found.count, found)) == 2 and any(users <= set(task.users) for task in tasks)
    assert len(tasks) == 2


THREADS = """
import os, sys
from pathlib import Path
import jobs.embed_pairs as job
from jobs.common.config import load_config
from jobs.common.runs import Run
from jobs.common.session import build_session
from tests.conftest import AS_OF

root, log, folder = sys.argv[1:]
size = ["spark.master=local[5]", "spark.task_cpus=5", "spark.shuffle_partitions=1", "spark.driver_memory=1g"]
named = [f"embed_pairs.model={folder}", f'embed_pairs.model_roots=["{folder}"]']
config = load_config(overrides=[f"storage.root={root}", *size, *named], environ={})
real = job.embed_udf

def watched(*given, **named):
    embed = real(*given, **named)

    def run(batches):
        yield from embed(batches)
        import torch
        names = [f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS")]
        Path(log).write_text(" ".join([str(torch.get_num_threads()), *map(os.environ.get, names)]))

    return run

job.embed_udf = watched
job.run(Run("embed_pairs", build_session(config, "threads"), config, AS_OF, "once"), config.get(job.Settings))
"""


class Clicks(nn.Module):
    def forward(self, users):
        return users["clicked_mask"].sum(dim=1)


class Head(nn.Module):
    def forward(self, state, user_index, items):
        both = torch.stack([state[user_index].float(), (items["item_id"] % 7).float()], dim=1)
        return both, both[:, :1]


@pytest.mark.slow
def test_a_worker_computes_with_as_many_threads_as_its_task_has_cpus(tables, fill, root, tmp_path):
    folder = tmp_path / "own"
    export_split_model(Clicks(), Head(), folder, name="own", inputs=["clicked_mask", "item_id"], heads=["click"])
    fill("candidate_pairs", [{"user_id": 1, "item_id": 5}])
    command = [sys.executable, "-c", THREADS, str(root), str(tmp_path / "threads"), str(folder)]
    # Not inherited: what stands in the worker's environment comes from Spark's settings.
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "threads").read_text() == "5 5 5 5"
    (row,) = tables.read("pair_embeddings").collect()
    assert decode([bytes(row.embedding)])[0].tolist() == [0, 5]
