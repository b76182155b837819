import random
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from jobs.common.clock import slice_of
from jobs.common.errors import UserError
from jobs.common.models import model_folder
from jobs.common.pair_features import FEATURES
from jobs.common.selection import Limits, Supply, choose, supply_of, with_density
from jobs.predict_pairs import Foundation, budget_of, fresh_pairs, run
from solaris_udf.selection import UNIT_COSTS, Costs, select_pairs
from solaris_udf.verifier import Verifier, save
from tests.conftest import AS_OF, hours, log_row

SCORED = "user_id BIGINT, item_id BIGINT, probability DOUBLE, expected_rows DOUBLE, fresh BOOLEAN"


def verifier_of(features=FEATURES, window=6.0) -> Verifier:
    """A model by hand: the logit falls with the hours since the pair was scored last."""
    weight = np.zeros((2, len(features)))
    weight[0, list(features).index("hours_since_last")] = -1.0
    return Verifier(
        tuple(features), window, np.zeros(len(features)), np.ones(len(features)), ((weight, np.array([1.0, -3.0])),)
    )


def small_log(seed: int = 0):
    draw = random.Random(seed)
    rows = {}
    for _ in range(60):
        user, at = draw.randrange(6), AS_OF - hours(draw.randrange(1, 60))
        for item in draw.sample(range(15), 4):
            rows[user, item, at] = log_row(user, item, at)
    return list(rows.values())


def pairs_of(tables, *columns, at=AS_OF):
    found = tables.read_slice("candidate_pairs", at).select("user_id", "item_id", *columns).collect()
    return sorted(tuple(row) for row in found)


def test_selection_is_the_one_defined_in_numpy_and_is_exact_at_the_cut(spark, monkeypatch):
    draw = np.random.default_rng(3)
    users, items = draw.integers(-5, 40, 900), np.arange(900)
    # Many ties, a user that is nearly all of it, and values that are a bucket's whole width apart.
    values = draw.choice([0.001, 0.02, 0.1, 0.1001, 0.5, 1.7], 900)
    users[:200] = 7
    frame = (
        spark.createDataFrame(
            list(
                zip(users.tolist(), items.tolist(), (values / 2).tolist(), values.tolist(), [False] * 900, strict=True)
            ),
            SCORED,
        )
        .repartition(5)
        .persist()
    )
    for costs, budget, rows_per_task in (
        (Costs(0.0, 1.0), 333.0, 500_000),
        (Costs(6.0, 1.0), 400.0, 40),
        (Costs(50.0, 2.0), 9999.0, 40),
    ):
        monkeypatch.setattr("jobs.common.selection.ROWS_PER_TASK", rows_per_task)
        ranked = with_density(frame, costs, Limits()).persist()
        choice = choose(ranked, supply_of(ranked), costs, budget)
        found = {row.item_id for row in choice.pairs.where("action = 'compute'").collect()}
        assert choice.pairs.count() == 900
        choice.release()
        ranked.unpersist()
        assert found == set(items[select_pairs(users, items, values, costs, budget)].tolist())
    limited = (
        with_density(frame, Costs(0.0, 1.0), Limits(min_probability=0.04, pairs_per_user=3, users_per_item=1))
        .where("rank IS NOT NULL")
        .collect()
    )
    assert all(row.probability >= 0.04 and row.rank <= 3 for row in limited)
    # Every item has one user, so the limit per user is what counts: the three best of each user that has as many.
    likely = values / 2 >= 0.04
    assert len(limited) == sum(min(3, int((likely & (users == user)).sum())) for user in set(users.tolist()))
    frame.unpersist()


def test_a_first_pair_also_counts_the_rows_that_the_mean_will_serve(spark):
    # User 1 has a fresh pair; users 2 and 3 have none. The others' rows count a tenth: 2's first is worth 0.3 + 0.1 x
    # 0.5, 3's 0.2 + 0.1 x 0; a user's second pair and all of user 1's are worth their own rows.
    values = [(1, 1, 0.9, True), (1, 2, 0.34, False), (2, 3, 0.3, False), (2, 4, 0.25, False), (2, 5, 0.25, False)]
    rows = [(user, item, 0.5, value, fresh) for user, item, value, fresh in [*values, (3, 6, 0.2, False)]]
    frame = spark.createDataFrame(rows, SCORED)
    found = {row.item_id: row.density for row in with_density(frame, UNIT_COSTS, Limits(), 0.1).collect()}
    assert found == {1: None, 2: 0.34, 3: pytest.approx(0.35), 4: 0.25, 5: 0.25, 6: 0.2}
    ranked = with_density(frame, UNIT_COSTS, Limits(), 0.1).persist()
    choice = choose(ranked, supply_of(ranked), UNIT_COSTS, 1.0)
    assert [row.item_id for row in choice.pairs.where("action = 'compute'").collect()] == [3]
    choice.release()
    ranked.unpersist()
    # A user's cost is shared by what the user's pairs bring: (0.35 + 0.25 + 0.25) / (1 + 3) is the best ratio.
    by_cost = {row.item_id: row.density for row in with_density(frame, Costs(1.0, 1.0), Limits(), 0.1).collect()}
    assert by_cost[3] == pytest.approx(0.85 / 4) and by_cost[6] == pytest.approx(0.1)


def test_first_slice_writes_nothing_and_says_so(make_run, tables):
    job, settings = make_run("predict_pairs")
    report = run(job, settings)
    assert (report.rows_in, report.rows_out, report.metrics["candidates"]) == (0, 0, 0)
    assert tables.read("candidate_pairs").count() == 0 and tables.read("score_histogram").count() == 0


def test_without_a_verifier_decayed_frequency_decides(make_run, tables, fill):
    fill(
        "ranking_log",
        [log_row(1, 10, AS_OF - hours(12)), log_row(1, 10, AS_OF - hours(24)), log_row(2, 11, AS_OF - hours(36))],
    )
    job, settings = make_run("predict_pairs", AS_OF, "predict_pairs.budget=5")
    report = run(job, settings)
    # Decayed counts 1/2 + 1/4 and 1/8, times ln 2 / 12 h * 6 h.
    expected = {10: 0.75 * np.log(2) / 2, 11: 0.125 * np.log(2) / 2}
    rows = {row.item_id: row for row in tables.read("candidate_pairs").collect()}
    assert {item: row.expected_rows for item, row in rows.items()} == pytest.approx(expected, abs=1e-6)
    assert rows[10].probability == pytest.approx(1 - np.exp(-expected[10]), abs=1e-6)
    assert (rows[10]["rank"], rows[10].cost, rows[10].action, rows[10].sources) == (1, 1.0, "compute", ["recent"])
    assert report.metrics["verifier_used"] == 0 and report.metrics["expected_rows"] == pytest.approx(
        sum(expected.values()), abs=1e-5
    )
    histogram = tables.read("score_histogram").collect()
    assert sorted((row.bucket, row.action, row.pairs) for row in histogram) == [
        (0.04, "compute", 1),
        (0.22, "compute", 1),
    ]


@pytest.fixture
def partitions(spark):
    """Sets the number of shuffle partitions for the test."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    yield lambda count: spark.conf.set("spark.sql.shuffle.partitions", str(count))
    spark.conf.set("spark.sql.shuffle.partitions", before)


def test_the_whole_job_the_future_changes_nothing_nor_does_the_partitioning(make_run, tables, fill, partitions):
    partitions(1)
    fill("ranking_log", small_log())
    save(verifier_of(), model_folder(make_run("predict_pairs")[0].config, "verifier", AS_OF))
    override = ("predict_pairs.budget=12", "predict_pairs.max_pairs_per_user=4")
    job, settings = make_run("predict_pairs", AS_OF, *override)
    report = run(job, settings)
    first = pairs_of(tables, "probability", "expected_rows", "sources", "rank", "cost", "action")
    histogram = sorted(tuple(row) for row in tables.read("score_histogram").drop("run_id").collect())
    assert len(first) == report.rows_out == 12 and report.metrics["verifier_used"] == 1
    assert max(sum(1 for row in first if row[0] == user) for user in range(6)) <= 4
    # Later rows, rows that arrive later, and another job's slice of a later time.
    fill(
        "ranking_log",
        [log_row(user, 99, AS_OF) for user in range(6)]
        + [log_row(user, 98, AS_OF - hours(1), arrived_at=AS_OF + hours(1)) for user in range(6)],
        AS_OF + hours(6),
    )
    fill("items", [{"item_id": 97, "category_id": 1, "created_at": AS_OF - hours(1)}], AS_OF + hours(6))
    partitions(5)
    run(*make_run("predict_pairs", AS_OF, *override))
    assert pairs_of(tables, "probability", "expected_rows", "sources", "rank", "cost", "action") == first
    assert sorted(tuple(row) for row in tables.read("score_histogram").drop("run_id").collect()) == histogram


def test_fresh_pairs_are_reused_at_no_cost_and_the_model_says_what_pairs_cost(make_run, tables, fill, monkeypatch):
    fill("ranking_log", [log_row(user, item, AS_OF - hours(1)) for user in (1, 2) for item in (10, 11, 12)])

    def embedded(item, **more):
        return {"user_id": 1, "item_id": item, "embedding": b"00", "model_version": "m1", **more}

    fill("pair_embeddings", [embedded(10)], AS_OF - hours(18))  # expires as the window ends
    fill("pair_embeddings", [embedded(11)], AS_OF - hours(24))  # expires before
    fill("pair_embeddings", [embedded(12, model_version="m0")], AS_OF - hours(6))  # of another model
    fill("pair_embeddings", [embedded(12)], AS_OF)  # this slice's own, as a retry finds it
    monkeypatch.setattr("jobs.predict_pairs.foundation_at", lambda config, as_of: Foundation(Costs(100.0, 10.0), "m1"))
    job, settings = make_run("predict_pairs", AS_OF, "predict_pairs.budget=130", "predict_pairs.budget_unit=flops")
    report = run(job, settings)
    # 100 + 3 * 10 buys user 2 whole; user 1 has only two pairs to compute.
    assert pairs_of(tables, "action", "cost") == [
        (1, 10, "reuse", 0.0),
        (2, 10, "compute", 110.0),
        (2, 11, "compute", 10.0),
        (2, 12, "compute", 10.0),
    ]
    assert {name: report.metrics[name] for name in ("selected", "computed", "reused", "cost", "users")} == {
        "selected": 4,
        "computed": 3,
        "reused": 1,
        "cost": 130,
        "users": 1,
    }
    short, _ = make_run("predict_pairs", AS_OF, "serving.ttl_hours=4")
    assert fresh_pairs(short, "m1").count() == 0  # nothing outlives a window longer than the TTL
    assert fresh_pairs(job, None).count() == 0


def test_seconds_buy_what_the_measured_rate_says(make_run, fill):
    job, settings = make_run("predict_pairs", AS_OF, "predict_pairs.budget=2", "predict_pairs.budget_unit=seconds")
    supply = Supply(candidates=100, fresh=0, eligible=100, expected_rows=10.0, buckets=())
    with pytest.raises(UserError, match="no embed_pairs run before this slice"):
        budget_of(job, settings, supply, UNIT_COSTS)

    def done(number, at, rate):
        return {
            "run_id": f"r{number}",
            "job": "embed_pairs",
            "slice": slice_of(at),
            "as_of": at,
            "status": "succeeded",
            "config_hash": "x",
            "rows_in": 1,
            "rows_out": 10,
            "rows_rejected": 0,
            "seconds": 2.0,
            "started_at": datetime(2026, 1, 1, tzinfo=UTC),
            "metrics": rate,
        }

    fill(
        "job_runs", [done(1, AS_OF - hours(6), {"pairs_per_second": 3.5}), done(2, AS_OF, {"pairs_per_second": 1000.0})]
    )
    assert budget_of(job, settings, supply, UNIT_COSTS) == 7
    fill("job_runs", [done(3, AS_OF - hours(5), {}), done(4, AS_OF - hours(4), {})])
    assert budget_of(job, settings, supply, UNIT_COSTS) == 10  # the median; without the metric, rows a second


def test_settings_and_models_that_do_not_fit_are_the_users_to_fix(make_run, make_config, tables, fill):
    for bad in ("predict_pairs.budget=0", "predict_pairs.budget=-5", "predict_pairs.budget_share=0"):
        with pytest.raises(UserError, match=bad.split("=")[0]):
            make_config(bad)
    job, settings = make_run("predict_pairs")
    save(verifier_of((*FEATURES[1:], "moon_phase"), window=3.0), model_folder(job.config, "verifier", AS_OF))
    with pytest.raises(
        UserError, match=r"moon_phase is not computed; rows_1h is unknown to it; its window is 3\.0 h"
    ) as error:
        run(job, settings)
    assert slice_of(AS_OF) in str(error.value)


def test_a_quiet_window_and_a_user_and_item_never_seen_before(make_run, tables, fill):
    """Nobody came in the last window; then a user whose first row is of an item that `items` has not heard of."""
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(7)), log_row(1, 11, AS_OF - hours(30))])
    save(verifier_of(), model_folder(make_run("predict_pairs")[0].config, "verifier", AS_OF))
    job, settings = make_run("predict_pairs", AS_OF, "predict_pairs.budget_share=1")
    assert run(job, settings).metrics["computed"] == 2
    assert pairs_of(tables, "sources") == [(1, 10, ["recent"]), (1, 11, ["recent"])]  # no misses, nothing rises
    later = AS_OF + hours(6)
    fill("ranking_log", [log_row(-5, 2**62 + 1, later - timedelta(microseconds=1))], later)
    job, settings = make_run("predict_pairs", later, "predict_pairs.budget_share=1")
    run(job, settings)
    (found,) = (row for row in tables.read_slice("candidate_pairs", later).collect() if row.user_id == -5)
    assert (found.item_id, found.sources, found.action) == (2**62 + 1, ["misses", "recent"], "compute")
    # By hand: the logit is 1 - log(1 + hours since last), and no time has passed.
    assert found.probability == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)


def test_a_budget_of_flops_or_seconds_must_be_more_than_nothing_too(make_config):
    for unit in ("flops", "seconds", "pairs"):
        for value in ("0", "-0.5", "nan"):
            with pytest.raises(UserError, match=r"predict_pairs\.budget"):
                make_config(f"predict_pairs.budget_unit={unit}", f"predict_pairs.budget={value}")
