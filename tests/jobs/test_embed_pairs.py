"""embed_pairs against five-line fake models whose embeddings can be worked out by hand."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import functions as F

import jobs.embed_pairs as job
from jobs.common.errors import RunFailed, UserError
from solaris_udf.codec import decode, encode
from solaris_udf.foundation.alignment import rotated
from solaris_udf.foundation.contract import Description
from solaris_udf.foundation.features import check_names
from solaris_udf.foundation.model import Model
from solaris_udf.foundation.udf import embed_udf_of
from tests.conftest import AS_OF, hours

HISTORY = {
    "shown": [],
    "clicked": [],
    "requests": 1,
    "scored_rows": 1,
    "shown_rows": 0,
    "clicked_rows": 0,
    "last_event_time": AS_OF - hours(1),
    "checkpoint": True,
}
LOW, HIGH = -(2**63), 2**63 - 1


def description(version="m1", dim=3):
    return Description(
        "fake",
        version,
        dim,
        check_names(["clicked_mask", "item_id"]),
        {"clicked": 4, "shown": 4},
        0,
        ("click",),
        1.0,
        1.0,
        {"user_encoder.pt2": "", "pair_head.pt2": ""},
    )


def fake(log, bad=(), killed_after=None):
    """Embedding of a pair: clicks of the user, item id mod 7, 1. Writes its calls down, so that they can be counted.

    killed_after: once this many pairs were written down, the worker that gets the next ones is killed, one time.
    """

    def load():
        with Path(log, f"load-{os.getpid()}").open("a") as file:
            file.write("x")

        def embed(state, index, items):
            if killed_after and len(computed(Path(log))) >= killed_after and not Path(log, "killed").exists():
                Path(log, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with Path(log, f"pairs-{os.getpid()}").open("a") as file:
                file.writelines(f"{item}\n" for item in items["item_id"])
            out = np.stack([state[index], items["item_id"] % 7, np.ones(len(index))], axis=1).astype(np.float32)
            out[np.isin(items["item_id"], bad)] = np.nan
            return lambda: (out, np.zeros((len(index), 1), np.float32))

        return Model(description(), lambda users: users["clicked_mask"].sum(1), embed)

    return load


def turned(load, rotation):
    return load if rotation is None else lambda: rotated(load(), rotation)


@pytest.fixture
def with_model(monkeypatch, tmp_path):
    """with_model(loader_options...) makes the job run the fake; returns the folder with its call records."""
    log = tmp_path / "calls"
    log.mkdir()

    def use(**options):
        monkeypatch.setattr(job, "_model", lambda _: (Path("fake"), description()))
        monkeypatch.setattr(
            job,
            "embed_udf",
            lambda folder, items, *, codec, threads, limits, rotation, **_: embed_udf_of(
                turned(fake(str(log), **options), rotation), items, codec=codec, threads=threads, limits=limits
            ),
        )
        return log

    return use


def computed(log):
    return sorted(int(line) for file in log.glob("pairs-*") for line in file.read_text().split())


def test_selected_pairs_are_embedded_once_also_when_the_run_is_repeated(tables, fill, make_run, with_model):
    fill(
        "candidate_pairs",
        [
            {"user_id": 1, "item_id": LOW, "probability": 0.25},
            {"user_id": 1, "item_id": HIGH, "probability": 0.125},
            {"user_id": 1, "item_id": 5},
            {"user_id": LOW, "item_id": 2**53 + 1},
            {"user_id": HIGH, "item_id": 13},
            {"user_id": HIGH, "item_id": 77},
            {"user_id": 1, "item_id": 99, "action": "reuse"},
        ],
    )
    fill(
        "user_histories",
        [
            {**HISTORY, "user_id": 1, "clicked": [{"item_id": 5, "event_time": AS_OF - hours(h)} for h in (3, 2)]},
        ],
    )
    fill("items", [{"item_id": 5, "category_id": None}, {"item_id": HIGH, "category_id": 3}])
    log = with_model(bad=(13,))
    run, settings = make_run("embed_pairs", AS_OF, "quality.min_rows_for_rate=100")
    report = job.run(run, settings)
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (6, 5, 1)
    assert (report.metrics["pairs"], report.metrics["users"], report.metrics["reused"]) == (6, 3, 0)
    assert computed(log) == sorted([LOW, HIGH, 5, 2**53 + 1, 13, 77])
    assert all(file.read_text() == "x" for file in log.glob("load-*"))  # one load a worker

    rows = {(row.user_id, row.item_id): row for row in tables.read("pair_embeddings").collect()}
    expected = {
        (1, LOW): [2, LOW % 7, 1],
        (1, HIGH): [2, HIGH % 7, 1],
        (1, 5): [2, 5, 1],
        (LOW, 2**53 + 1): [0, (2**53 + 1) % 7, 1],
        (HIGH, 77): [0, 0, 1],
    }
    assert {key: decode([bytes(row.embedding)])[0].tolist() for key, row in rows.items()} == expected
    assert {row.model_version for row in rows.values()} == {"m1"}
    assert (rows[(1, LOW)].probability, rows[(1, HIGH)].probability) == (0.25, 0.125)
    refused = tables.read("rejected_rows").collect()
    assert [(row.reason, row.row) for row in refused] == [
        ("embedding is not finite", f'{{"user_id":{HIGH},"item_id":13,"model_version":"m1"}}')
    ]

    # Again: only the refused pair is tried; a new candidate is added, one no longer wanted goes, and one that stays has
    # the probability that it is wanted with now.
    new = [{"user_id": user, "item_id": item, "probability": p} for user, item, p in ((1, 5, 0.75), (2, 8, 0.0625))]
    fill("candidate_pairs", [*new, {"user_id": HIGH, "item_id": 13}])
    report = job.run(run, settings)
    assert (report.rows_in, report.rows_out, report.metrics["reused"]) == (3, 2, 1)
    assert computed(log) == sorted([LOW, HIGH, 5, 2**53 + 1, 13, 77, 13, 8])
    again = {(row.user_id, row.item_id): row for row in tables.read("pair_embeddings").collect()}
    assert {key: row.probability for key, row in again.items()} == {(1, 5): 0.75, (2, 8): 0.0625}
    assert bytes(again[(1, 5)].embedding) == bytes(rows[(1, 5)].embedding)

    # A rewritten history makes the stored vectors stale.
    fill("user_histories", [{**HISTORY, "user_id": 1, "run_id": "later"}])
    job.run(run, settings)
    stored = tables.read("pair_embeddings").collect()
    fresh = {row.item_id: decode([bytes(row.embedding)])[0].tolist() for row in stored}
    assert fresh == {5: [0, 5, 1], 8: [0, 1, 1]}

    # Too many refused: nothing is published, the slice stays as it was.
    fill("candidate_pairs", [{"user_id": 1, "item_id": 13}])
    strict, settings = make_run("embed_pairs", AS_OF, "quality.min_rows_for_rate=1")
    with pytest.raises(RunFailed, match="1 of 1 rows were rejected"):
        job.run(strict, settings)
    assert tables.read_slice("pair_embeddings", AS_OF).count() == 2


def test_no_candidates_is_an_empty_slice_and_a_lost_pair_fails_the_run(tables, fill, make_run, with_model, monkeypatch):
    with_model()
    run, settings = make_run("embed_pairs")
    assert job.run(run, settings).rows_out == 0
    assert tables.read("pair_embeddings").count() == 0
    fill("candidate_pairs", [{"user_id": 1, "item_id": 5}, {"user_id": 1, "item_id": 6}])
    # One pair lost; one lost and another doubled, which the counts alone can't tell.
    for item_ids, embedded in (([5], 1), ([5, 5], 2)):
        given = {"item_ids": F.array(*map(F.lit, item_ids)), "probabilities": F.array(*map(F.lit, [0.5] * embedded))}
        monkeypatch.setattr(job, "grouped_by_user", lambda *a, given=given: _grouped(*a).withColumns(given))
        with pytest.raises(RunFailed, match=f"2 pairs in, but {embedded} embedded and 0 rejected"):
            job.run(run, settings)
        shutil.rmtree(run.config.path("staging"))
    assert tables.read("pair_embeddings").count() == 0


_grouped = job.grouped_by_user


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


def test_filters_structs_and_limits_behind_the_model_never_call_it_twice_for_a_pair(spark, make_run, fill, tmp_path):
    fill("items", [{"item_id": 1}])
    items = job.write_item_table(make_run("embed_pairs")[0])
    pairs = spark.range(30).select(
        (F.col("id") % 3).alias("user_id"), F.col("id").alias("item_id"), F.lit(0.5).alias("probability")
    )
    events = "array<struct<item_id:bigint,event_time:timestamp>>"
    none = [F.lit(None).cast(events).alias("shown"), F.lit(None).cast(events).alias("clicked")]
    counts = [F.lit(0).cast("bigint").alias(name) for name in job.COUNTS]
    histories = spark.range(3).select(F.col("id").alias("user_id"), *none, *counts)
    inputs = job.grouped_by_user(pairs, histories, 2, 4).withColumn("at", F.lit(AS_OF))

    def embedded(name):
        log = tmp_path / name
        log.mkdir()
        return log, inputs.mapInArrow(embed_udf_of(fake(str(log)), items), job.OUTPUT_DDL)

    log, rows = embedded("filter")
    both = rows.withColumn("pair", F.struct("embedding", "reason")).where("item_id >= 20 AND embedding IS NOT NULL")
    assert both.select("pair.embedding", "pair.reason", F.length("embedding")).toArrow().num_rows == 10
    assert computed(log) == list(range(30))
    log, rows = embedded("limit")
    assert rows.limit(5).toArrow().num_rows == 5
    found = computed(log)
    assert len(found) == len(set(found))


def test_a_model_outside_the_roots_is_the_users_to_fix(make_run, tmp_path):
    run, settings = make_run("embed_pairs", AS_OF, f"embed_pairs.model={tmp_path}/elsewhere")
    with pytest.raises(UserError, match="outside the allowed roots"):
        job.run(run, settings)


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
    rows = tables.read("pair_embeddings").collect()
    assert len({(row.user_id, row.item_id) for row in rows}) == len(rows) == 36
    assert all(decode([bytes(row.embedding)])[0].tolist() == [0, row.item_id % 7, 1] for row in rows)


def test_a_new_models_space_is_turned_onto_the_old_ones_once_and_for_all(tables, fill, make_run, with_model):
    with_model()
    quarter = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, -1]], dtype=np.float32)  # a turn and a reflection
    pairs = [(user, item) for user in range(8) for item in range(5)]
    clicks = [{"item_id": 1, "event_time": AS_OF - hours(9)}]
    fill("user_histories", [{**HISTORY, "user_id": user, "clicked": clicks * (user % 3)} for user in range(8)])
    plain = {(user, item): np.array([user % 3, item % 7, 1], dtype=np.float32) for user, item in pairs}
    old = [
        {"user_id": u, "item_id": i, "model_version": "m0", "embedding": encode(plain[u, i][None] @ quarter)[0].as_py()}
        for u, i in pairs
    ]

    def stored(at):
        rows = tables.read_slice("pair_embeddings", at).where("model_version = 'm1'").collect()
        return {(row.user_id, row.item_id): decode([bytes(row.embedding)])[0] for row in rows}

    fill("candidate_pairs", [{"user_id": user, "item_id": 6} for user in range(3)])
    fill("pair_embeddings", old[:29], AS_OF - hours(6))
    few, settings = make_run("embed_pairs", AS_OF, "embed_pairs.align=true")
    with pytest.raises(RunFailed, match=r"29 pairs of model m0 .* 30 of one codec"):
        job.run(few, settings)
    fill("pair_embeddings", old, AS_OF - hours(6))
    report = job.run(few, settings)
    # Without the rotation: (x, y, 1) stands where (-y, x, -1) should.
    rows = np.array([plain[pair] for pair in pairs])
    before = np.linalg.norm(rows - rows @ quarter) / np.linalg.norm(rows)
    assert report.metrics["alignment_pairs"] == 40 and report.metrics["alignment_error"] == pytest.approx(0, abs=1e-3)
    assert report.metrics["alignment_error_before"] == pytest.approx(before, abs=1e-3)
    found = stored(AS_OF)
    assert {pair: vector.round(2).tolist() for pair, vector in found.items()} == {
        (user, 6): [-6, user % 3, -1] for user in range(3)
    }

    # The version keeps its space, whatever the setting says later.
    fill("candidate_pairs", [{"user_id": 4, "item_id": 5}], AS_OF + hours(6))
    assert job.run(*make_run("embed_pairs", AS_OF + hours(6))).metrics["alignment_pairs"] == 40
    assert stored(AS_OF + hours(6))[4, 5].round(2).tolist() == [-5, 1, -1]


def test_a_version_that_has_pairs_already_or_no_predecessor_is_not_turned(tables, fill, make_run, with_model):
    with_model()
    fill("candidate_pairs", [{"user_id": 1, "item_id": 5}])
    report = job.run(*make_run("embed_pairs", AS_OF, "embed_pairs.align=true"))
    assert "alignment_error" not in report.metrics and report.rows_out == 1
    fill("pair_embeddings", [{"user_id": 1, "item_id": 9, "model_version": "m0", "embedding": b"000000"}])
    fill("candidate_pairs", [{"user_id": 1, "item_id": 6}], AS_OF + hours(6))
    assert job.run(*make_run("embed_pairs", AS_OF + hours(6), "embed_pairs.align=true")).rows_out == 1
    row = tables.read_slice("pair_embeddings", AS_OF + hours(6)).first()
    assert decode([bytes(row.embedding)])[0].tolist() == [0, 6, 1]


KILLED = """
import os, sys, signal
from pathlib import Path
import jobs.embed_pairs as job
from datetime import UTC, datetime
from jobs.common.config import load_config
from jobs.common.runs import Run
from jobs.common.session import build_session
from solaris_udf.foundation.udf import embed_udf_of
from tests.jobs.test_embed_pairs import description, fake
root, log, kill = sys.argv[1:]
config = load_config(overrides=[f"storage.root={root}", "spark.master=local[1]", "spark.shuffle_partitions=1",
                                "spark.driver_memory=1g", "embed_pairs.chunk_pairs=8"], environ={})
job._model = lambda _: (Path("fake"), description())
job.embed_udf = lambda folder, items, *, codec, threads, limits, **_: embed_udf_of(fake(log), items)
if kill == "yes":
    real, done = job._Staging.next_chunk, []
    def next_chunk(self):
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(1)
        return real(self)
    job._Staging.next_chunk = next_chunk
spark = build_session(config, "killed")
run = Run("embed_pairs", spark, config, datetime(2026, 1, 3, tzinfo=UTC), "again")
print(job.run(run, config.get(job.Settings)).metrics)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_gives_the_rows_of_an_undisturbed_one(tables, fill, root, tmp_path):
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user in range(12) for item in range(3)])
    log = tmp_path / "calls"
    log.mkdir()

    def start(kill):
        command = [sys.executable, "-c", KILLED, str(root), str(log), kill]
        return subprocess.run(command, capture_output=True, text=True, timeout=300).returncode

    assert start("yes") == -signal.SIGKILL
    before = len(computed(log))
    assert 0 < before < 36 and tables.read("pair_embeddings").count() == 0
    assert start("no") == 0
    assert len(computed(log)) == 36  # nothing twice
    rows = tables.read("pair_embeddings").collect()
    assert len({(row.user_id, row.item_id) for row in rows}) == len(rows) == 36
    assert all(decode([bytes(row.embedding)])[0].tolist() == [0, row.item_id % 7, 1] for row in rows)
