from datetime import timedelta

import numpy as np
import pytest

from jobs import evaluate_uplift
from jobs.common.clock import micros
from jobs.common.errors import UserError
from jobs.common.vm_budget import with_bought_at
from jobs.common.vm_data import sampled
from jobs.common.vm_rows import item_counts, states_at, states_before
from solaris_udf.codec import encode
from solaris_udf.uplift import Figure
from tests.conftest import AS_OF, hours, log_row

SETTINGS = [
    "evaluate_uplift.seeds=2",
    "evaluate_uplift.epochs=5",
    "evaluate_uplift.batch=128",
    "evaluate_uplift.replicates=300",
    "evaluate_uplift.coverage_sweep=[0.3, 1.0]",
    'evaluate_uplift.feature_sets=["embeddings", "distillation", "every_pair", "shuffled", "flags_only"]',
    "evaluate_uplift.tier_sweep=true",
    "evaluate_uplift.ttl_sweep=[0.5, 2]",
    "evaluate_uplift.codec_sweep=true",
    "evaluate_uplift.budget_sweep=[1.0]",
    'serving.tiers=["pair", "user_mean"]',
]
SLICES = [AS_OF - hours(6 * back) for back in (5, 4, 3, 2, 1, 0)]


def training_row(number, as_of, user, item, vector, clicked, version="m1", shown=True):
    """A shown row an hour before as_of that got its pair's vector; none without a vector."""
    served = vector is not None
    packed = encode(vector[None])[0].as_py() if served else None
    return {
        "request_id": f"r{number}",
        "event_time": as_of - hours(1),
        "user_id": user,
        "item_id": item,
        "surface": "feed",
        "shown": shown,
        "clicked": clicked,
        "snapshot_id": "s" if served else None,
        "model_version": version if served else None,
        "tier": "pair" if served else "none",
        "embedding": packed,
        "age_seconds": 3600 if served else -1,
        "similarity": 1.0 if served else 0.0,
        "user_tier": "none",
        "user_age_seconds": -1,
        "user_similarity": 0.0,
    }


@pytest.fixture
def training(spark, root, fill):
    """900 shown rows a slice of 80 users; a click's chance depends on the vector alone, and the truth is kept."""
    rng = np.random.default_rng(3)
    truth, number = [], 0
    for as_of in SLICES:
        rows = []
        for _ in range(900):
            vector = rng.normal(size=4).astype(np.float16).astype(np.float32)
            chance = float(1 / (1 + np.exp(1.0 - 2.5 * vector[0])))
            user, item = int(rng.integers(0, 80)), int(rng.integers(0, 30))
            rows.append(training_row(number, as_of, user, item, vector, bool(rng.random() < chance)))
            truth.append((f"r{number}", item, chance))
            number += 1
        rows.append(training_row(f"other{as_of}", as_of, 1, 2, None, True, shown=False))
        fill("training_rows", rows, as_of)
    fill(
        "items",
        [
            {"item_id": item, "category_id": item % 3, "advertiser_id": item % 5, "features": [0.5, float(item)]}
            for item in range(30)
        ],
        SLICES[0],
    )
    (root / "raw" / "world").mkdir(parents=True)
    frame = spark.createDataFrame(truth, "request_id STRING, item_id BIGINT, click_probability DOUBLE")
    frame.write.parquet(str(root / "raw" / "world" / "truth"))


@pytest.mark.slow
def test_vectors_that_know_the_click_win_and_the_controls_do_not(make_run, tables, training):
    report = evaluate_uplift.run(*make_run("evaluate_uplift", AS_OF, *SETTINGS))
    rows = tables.read("vm_evaluations").collect()
    found = {(row.sweep, row.setting, row.model, row.feature_set, row.seed, row.metric): row for row in rows}
    assert len(found) == len(rows) == report.rows_out
    # 36 hours are six slices; the last 12 hours, two slices, evaluate
    assert (report.rows_in, report.metrics["train_rows"], report.metrics["eval_rows"]) == (5400, 3600, 1800)
    assert {row.rows for row in rows if (row.sweep, row.setting) != ("tier_rows", "user_mean")} == {1800}
    assert {row.dataset for row in rows} == {"world"}

    def overall(metric, feature_set="embeddings", model="vm", sweep="main", setting=""):
        return found[sweep, setting, model, feature_set, -1, metric]

    assert overall("rll").ci_high < -5
    assert overall("log_loss", "", "truth").value < overall("log_loss").value < overall("log_loss", "base").value
    assert overall("rll", "shuffled").ci_high > 0 and overall("rll", "flags_only").ci_high > 0
    assert overall("auc").value > 0.75 > overall("auc", "base").value
    assert overall("calibration").value == pytest.approx(1, abs=0.15)
    seeds = [found["main", "", "vm", "embeddings", seed, "log_loss"].value for seed in (0, 1)]
    assert seeds[0] != seeds[1] and overall("log_loss").value == pytest.approx(sum(seeds) / 2)
    # More coverage, less loss; all of it is the main figure.
    partly, fully = overall("rll", sweep="coverage", setting="0.3"), overall("rll", sweep="coverage", setting="1")
    assert fully.value == overall("rll").value < partly.value < 0
    # All that was served are pairs an hour old: a shorter time to live leaves nothing, a longer one changes nothing.
    assert abs(overall("rll", sweep="ttl", setting="0.5").value) < 3 < -overall("rll").value
    assert overall("rll", sweep="ttl", setting="2").value == overall("rll").value
    assert overall("rll", sweep="tier", setting="pair").value == overall("rll").value
    added = overall("rll_added", sweep="tier", setting="pair + user_mean")
    assert (added.value, added.ci_low, added.ci_high) == (0, 0, 0)
    assert ("tier", "pair", "vm", "embeddings", -1, "rll_added") not in found
    # Every row was answered by its pair, none by the user's mean.
    assert overall("rll_added", sweep="tier_rows", setting="pair").value == overall("rll").value
    nothing = overall("rll_added", sweep="tier_rows", setting="user_mean")
    assert (nothing.value, nothing.rows, nothing.note) == (None, 0, "no evaluation row was answered by user_mean")
    assert overall("rll", sweep="codec", setting="float16").value == overall("rll").value
    assert overall("rll", sweep="budget", setting="1").value == overall("rll").value
    assert overall("rll", sweep="codec", setting="int8").value == pytest.approx(overall("rll").value, abs=0.5)
    # Without the foundation model nothing is made up about it, its age included.
    assert not any(row.sweep == "fm_age" for row in rows)
    assert not any(row.feature_set in ("distillation", "every_pair") for row in rows)
    assert "not below models/foundation" in overall("log_loss", "slice_start", "fm").note
    assert overall("transfer_ratio").value is None and "no foundation model" in overall("transfer_ratio").note

    evaluate_uplift.run(*make_run("evaluate_uplift", AS_OF, *SETTINGS))
    again = tables.read("vm_evaluations").collect()
    assert {(row.metric, row.seed, row.feature_set, row.setting, row.value) for row in again} == {
        (row.metric, row.seed, row.feature_set, row.setting, row.value) for row in rows
    }


def test_the_embeddings_figures_are_stated_by_the_models_age():
    kept = Figure("vm", "embeddings", -1, "rll", -2.0)
    others = [Figure("vm", "embeddings", 0, "rll", -2.1), Figure("vm", "both", -1, "rll", -3.0)]
    stated = evaluate_uplift.by_age([("main", "", figure) for figure in (others[0], kept, others[1])], hours(37.5))
    assert stated == [("fm_age", "37.5", kept)]


def test_a_smaller_budget_keeps_the_pairs_with_the_most_expected_rows(spark, fill, tables):
    made = AS_OF - hours(12)
    pairs = [
        {"user_id": 1, "item_id": item, "expected_rows": item / 10, "probability": 0.1, "rank": 11 - item, "cost": 1.0}
        for item in range(1, 11)
    ]
    pairs = [{**pair, "sources": ["recent"], "action": "compute"} for pair in pairs]
    fill("candidate_pairs", [*pairs, {**pairs[0], "item_id": 99, "expected_rows": 5.0, "action": "reuse"}], made)
    fill("candidate_pairs", [{**pairs[0], "item_id": 3, "expected_rows": 9.0}], made - hours(6))
    # Each row was served what the slice at `made` computed; event times have microseconds, ages whole seconds.
    late = timedelta(microseconds=700_000)
    rows = [
        {"user_id": 1, "item_id": item, "tier": tier, "event_time": made + hours(7) + late, "age_seconds": 7 * 3600}
        for item, tier in [(1, "pair"), (3, "pair"), (8, "pair"), (9, "pair"), (10, "pair"), (10, "neighbor_pair")]
    ]
    schema = "user_id BIGINT, item_id BIGINT, tier STRING, event_time TIMESTAMP, age_seconds INT"
    frame = spark.createDataFrame(rows, schema)
    found = with_bought_at(tables, frame, (0.2, 0.5, 1.0), made + hours(6), made + hours(6), 24.0).collect()
    bought = sorted((row.item_id, row.tier, row.bought_at) for row in found)
    assert bought == [
        (1, "pair", 1.0),
        (3, "pair", 1.0),
        (8, "pair", 0.5),
        (9, "pair", 0.2),
        (10, "neighbor_pair", None),
        (10, "pair", 0.2),
    ]
    without = with_bought_at(tables, frame, (), made, made, 24.0).collect()
    assert [row.bought_at for row in without] == [None] * 6


def test_what_is_missing_is_named(make_run, fill):
    with pytest.raises(UserError, match=r"no shown rows in .*run join_features"):
        evaluate_uplift.run(*make_run("evaluate_uplift", AS_OF))
    fill("training_rows", [training_row(1, AS_OF, 1, 2, None, True)], AS_OF)
    with pytest.raises(UserError, match=r"none of the 1 shown rows .* was served a vector"):
        evaluate_uplift.run(*make_run("evaluate_uplift", AS_OF))
    fill("training_rows", [training_row(1, AS_OF, 1, 2, np.ones(4), True)], AS_OF)
    with pytest.raises(UserError, match=r"0 shown rows with 0 clicks to train on.*at least 200"):
        evaluate_uplift.run(*make_run("evaluate_uplift", AS_OF))
    nothing = evaluate_uplift.Span(AS_OF - hours(6), AS_OF, "m1", None, 9)
    with pytest.raises(
        UserError, match=r"knows those before .*T18:00.* to train on before .*T12:00.*eval_hours smaller"
    ):
        evaluate_uplift.split_rows(None, nothing, AS_OF - hours(12), 50)
    with pytest.raises(UserError, match="unknown feature sets"):
        make_run("evaluate_uplift", AS_OF, 'evaluate_uplift.feature_sets=["magic"]')


def test_a_fresh_state_knows_all_before_the_row_and_nothing_after(spark, fill, tables):
    first, middle = AS_OF - hours(12), AS_OF - hours(6)

    def history(user, at, clicks, requests, shown):
        return {
            "user_id": user,
            "shown": [],
            "clicked": [(item, moment) for item, moment in clicks],
            "requests": requests,
            "scored_rows": 2 * shown,
            "shown_rows": shown,
            "clicked_rows": len(clicks),
            "last_event_time": at - hours(1),
            "checkpoint": at == first,
        }

    clicks = [(5, first - hours(1)), (6, first + hours(1)), (7, middle + hours(2))]
    for at, seen in ((first, 1), (middle, 2), (AS_OF, 3)):
        fill("user_histories", [history(1, at, clicks[:seen], 10 * seen, 20 * seen)], at)
    log = [
        [log_row(1, 6, first + hours(1), clicked=True), log_row(1, 8, first + hours(1), shown=False)],
        [log_row(1, 7, middle + hours(2), clicked=True)],
    ]
    asked = [(1, 6, first + hours(1), middle), (1, 31, middle + hours(1), AS_OF), (2, 32, middle + hours(3), AS_OF)]
    asked += [(1, 33, middle + hours(3), AS_OF), (1, 34, middle + hours(3), AS_OF)]
    log[1] += [log_row(*row[:3]) for row in asked[1:]]
    fill("ranking_log", log[0], middle)
    fill("ranking_log", log[1], AS_OF)
    rows = spark.createDataFrame(asked, "user_id BIGINT, item_id BIGINT, event_time TIMESTAMP, as_of TIMESTAMP")
    # What arrives after as_of changes nothing, even if it happened before the rows.
    late = [
        log_row(1, 40, first + minute, arrived_at=AS_OF + minute, clicked=True) for minute in (hours(0.1), hours(0.2))
    ]
    fill("ranking_log", late, AS_OF + hours(6))
    fill("user_histories", [history(1, AS_OF + hours(6), clicks * 2, 90, 90)], AS_OF + hours(6))
    found = {
        (row.user_id, micros(row["at"].replace(tzinfo=AS_OF.tzinfo))): row
        for row in states_before(tables, rows, first, AS_OF).collect()
    }
    assert len(found) == 4

    def state(user, at):
        row = found[user, micros(at)]
        return row.item_ids, (row.requests, row.scored_rows, row.shown_rows, row.clicked_rows)

    # The row's own request is not among what came before it, whatever else of the window is.
    assert state(1, first + hours(1)) == ([6], (10, 40, 20, 1))
    assert state(1, middle + hours(1)) == ([31], (11, 42, 21, 2))
    assert state(1, middle + hours(3)) == ([33, 34], (13, 44, 23, 3))
    assert state(2, middle + hours(3)) == ([32], (0, 0, 0, 0))
    # The model itself reads of the events those before `at`: the window's end knows them all.
    assert len(found[1, micros(middle + hours(1))].clicked) == 3


def test_states_and_counts_are_those_known_at_the_time(spark, fill, tables):
    def history(user, at, requests, checkpoint=False):
        return {
            "user_id": user,
            "shown": [],
            "clicked": [(5, at - hours(1))],
            "requests": requests,
            "scored_rows": 9,
            "shown_rows": 3,
            "clicked_rows": 1,
            "last_event_time": at - hours(1),
            "checkpoint": checkpoint,
        }

    early, late = AS_OF - hours(12), AS_OF - hours(6)
    fill("user_histories", [history(1, early, 10, True), history(2, early, 20, True)], early)
    fill("user_histories", [history(1, late, 11)], late)
    fill("user_histories", [history(1, AS_OF, 12)], AS_OF)
    asked = [(1, early), (1, late), (1, late - hours(1)), (2, late), (2, early - hours(1)), (3, late)]
    kinds = "user_id BIGINT, at TIMESTAMP, item_ids ARRAY<BIGINT>"
    keys = spark.createDataFrame([(user, at, [7]) for user, at in asked], kinds)
    states = states_at(tables, keys, early - hours(1), late).collect()
    assert {(row.user_id, micros(row["at"].replace(tzinfo=AS_OF.tzinfo))): row.requests for row in states} == {
        (1, micros(early)): 10,
        (1, micros(late)): 11,
        (1, micros(late - hours(1))): 10,
        (2, micros(late)): 20,
        (2, micros(early - hours(1))): 0,
        (3, micros(late)): 0,
    }
    stranger = next(row for row in states if row.user_id == 3)
    assert (stranger.shown, stranger.clicked, stranger.item_ids) == ([], [], [7])

    fill(
        "ranking_log",
        [
            log_row(1, 5, late - hours(1), clicked=True),
            log_row(2, 5, late - hours(3)),
            log_row(3, 5, late, clicked=True),
            log_row(4, 5, late - hours(2), shown=False),
            log_row(5, 6, late - hours(2), arrived_at=late + hours(1)),
        ],
        AS_OF,
    )
    counts = item_counts(tables, [late, AS_OF], 6).collect()
    found = {(row.item_id, row.known_at.hour): (row.item_shown, row.item_clicked) for row in counts}
    assert found == {(5, 18): (2, 1), (5, 0): (1, 1)}
    rows = spark.range(2000).selectExpr("CAST(id DIV 2 AS STRING) AS request_id", "id")
    part = [row.id for row in sampled(rows, 2000, 500).collect()]
    assert 350 < len(part) < 650 and {number ^ 1 for number in part} == set(part)
