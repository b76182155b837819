"""What embed_pairs writes: embedded, refused and reused pairs, and a new model's space turned onto the old one's."""

import json
import shutil

import numpy as np
import pytest
from pyspark.sql import functions as F

import jobs.embed_pairs as job
from jobs.common.errors import RunFailed, UserError
from solaris_udf.codec import decode, encode
from tests.conftest import AS_OF, hours
from tests.jobs.embed_fakes import HISTORY, computed

LOW, HIGH = -(2**63), 2**63 - 1


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
    log = with_model(odd={13: [np.nan] * 3})
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


def test_each_refused_pair_stands_in_rejected_rows_and_none_is_lost(tables, fill, make_run, with_model):
    nan, inf = float("nan"), float("inf")
    not_finite = {10: [nan, 0, 0], 11: [0, inf, 0], 12: [0, 0, 70_000]}  # the last one in float16 only
    lengths = {HIGH: [1, 2], LOW: [1, 2, 3, 4], 13: [], 2**53 + 1: [nan]}
    wanted = {(user, item) for user in (1, LOW, HIGH) for item in (*not_finite, *lengths, 20, 21)}
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user, item in sorted(wanted)])
    log = with_model(odd={**not_finite, **lengths})
    # One pair a batch: a wrong length is that of a whole batch.
    run, settings = make_run("embed_pairs", AS_OF, "quality.min_rows_for_rate=100", "embed_pairs.batch_pairs=1")

    def stored():
        embedded = {(row.user_id, row.item_id) for row in tables.read("pair_embeddings").collect()}
        rows = tables.read("rejected_rows").collect()
        assert {(row.source, row.slice) for row in rows} == {("embed_pairs", run.slice)}
        refused = {}
        for row in rows:
            told = json.loads(row.row)
            assert told["model_version"] == "m1"
            refused[told["user_id"], told["item_id"]] = row.reason
        assert len(refused) == len(rows)
        return embedded, refused

    report = job.run(run, settings)
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (27, 6, 21)
    assert report.metrics["reused"] == 0
    embedded, refused = stored()
    assert embedded == {pair for pair in wanted if pair[1] in (20, 21)} and refused.keys() == wanted - embedded
    for (_, item), reason in refused.items():
        other = f"embedding has {len(lengths.get(item, ()))} dimensions, the model declares 3"
        assert reason == ("embedding is not finite" if item in not_finite else other)

    # Again: pairs in = embedded + rejected + reused; the refused ones stand there once.
    report = job.run(run, settings)
    assert (report.rows_in, report.metrics["pairs"], report.metrics["reused"]) == (27, 21, 6)
    assert (report.rows_out, report.rows_rejected) == (6, 21) and stored() == (embedded, refused)
    assert len(computed(log)) == 27 + 21


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


def test_a_model_outside_the_roots_is_the_users_to_fix(make_run, tmp_path):
    run, settings = make_run("embed_pairs", AS_OF, f"embed_pairs.model={tmp_path}/elsewhere")
    with pytest.raises(UserError, match="outside the allowed roots"):
        job.run(run, settings)


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
