import random
import re
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from jobs import audit_coverage
from jobs.common.clock import slice_of
from jobs.common.errors import RunFailed
from tests.conftest import AS_OF, hours, log_row
from tests.jobs.snapshots import Pair, User, snapshot_row, vector, write_snapshot

SIX, NOON = AS_OF - hours(6), AS_OF - hours(12)
MINUTES = timedelta(minutes=1)
QUERIES = Path(__file__).parents[2] / "docs" / "coverage-audits.md"


def history(user, at, checkpoint=True):
    return {
        "user_id": user,
        "shown": [],
        "clicked": [],
        "requests": 1,
        "scored_rows": 1,
        "shown_rows": 0,
        "clicked_rows": 0,
        "last_event_time": at - hours(1),
        "checkpoint": checkpoint,
    }


@pytest.fixture
def window(root, fill):
    """The window [18:00, 24:00): a snapshot live from 18:10, another from 21:00; users 1 and 2 known, 3 and 4 not."""
    pairs, users = [Pair(1, 10, SIX, vector(1)), Pair(1, 11, SIX, vector(1))], [User(1, SIX, vector(1))]
    first = write_snapshot(root, SIX, pairs, users)
    second = write_snapshot(root, SIX, pairs[:1], users, version="m2")
    # A snapshot of the run's own slice answers everything; if it is ever used, the sums below are wrong.
    future = write_snapshot(root, AS_OF, [Pair(4, 10, NOON, vector(1))], [User(4, NOON, vector(1))])
    fill("snapshots", [snapshot_row(first, SIX + 10 * MINUTES)], SIX)
    fill("snapshots", [snapshot_row(second, SIX + hours(3), "m2")], SIX + hours(2))
    fill("snapshots", [snapshot_row(future, AS_OF + 10 * MINUTES)], AS_OF)
    fill("user_histories", [history(1, SIX), history(2, SIX)], SIX)
    # Item 10 is a day old from 18:25 on, item 11 made an hour after its first row, item 12 of unknown age.
    created = {10: SIX + 25 * MINUTES - hours(24), 11: SIX + 80 * MINUTES, 12: None}
    fill("items", [{"item_id": item, "created_at": at} for item, at in created.items()], SIX)

    def row(user, item, minutes, request, shown, surface="feed"):
        return log_row(user, item, SIX + minutes * MINUTES, request_id=request, shown=shown, surface=surface)

    fill(
        "ranking_log",
        [
            row(1, 10, 5, "a", True),  # no snapshot yet
            row(1, 10, 20, "b", True),  # first: pair, 20 min
            row(1, 11, 20, "b", False),  # first: pair, 20 min
            row(1, 12, 30, "c", True),  # first: user_mean, 30 min
            row(2, 10, 30, "d", True),  # first: none
            row(1, 10, 60, "e", False, "reels"),  # first: pair, 60 min
            row(1, 11, 200, "f", True, "reels"),  # second: user_mean, 200 min
            row(3, 10, 200, "g", False, "all"),  # second: none; a surface of the name that sums have
            row(1, 10, 210, "h", False),  # second: pair, 210 min
        ],
        AS_OF,
    )
    fill("ranking_log", [log_row(4, 10, AS_OF, request_id="next")], AS_OF + hours(6))
    fill(
        "candidate_pairs",
        [
            {"user_id": 1, "item_id": 10, "cost": 5.0, "expected_rows": 3.0},
            {"user_id": 1, "item_id": 11, "cost": 5.0, "expected_rows": 1.0},
            {"user_id": 2, "item_id": 99, "cost": 5.0, "expected_rows": 0.5},  # computed, never scored
            {"user_id": 3, "item_id": 10, "cost": 0.0, "expected_rows": 0.25, "action": "reuse"},  # reused and scored
            {"user_id": 2, "item_id": 10, "cost": 5.0, "expected_rows": 0.25},  # its embedding was refused
        ],
        SIX,
    )
    stored = b"\x00\x3c" * 4
    fill(
        "pair_embeddings",
        [{"user_id": user, "item_id": item, "embedding": stored} for user, item in ((1, 10), (1, 11), (2, 99))],
        SIX,
    )
    return first, second


def test_the_audit_counts_every_row_once_per_group_and_reconciles_the_predictions(make_run, tables, window, spark):
    first, second = window
    run, settings = make_run("audit_coverage", AS_OF, "audit_coverage.hot_rows_a_day=24")  # 6 in this window
    report = audit_coverage.run(run, settings)
    rows = tables.read_slice("coverage_audit", AS_OF).collect()
    found = {(row.snapshot_id, row.surface, row.population, row.segment, row.tier): row for row in rows}
    assert len(found) == len(rows) == report.rows_out
    assert {(row.window_start.isoformat(), row.window_end.isoformat()) for row in rows} == {
        ("2026-01-02T18:00:00", "2026-01-03T00:00:00")
    }

    def counts(surface, population, segment="all"):
        return {(key[0], key[4]): row.rows for key, row in found.items() if key[1:4] == (surface, population, segment)}

    assert counts("all", "scored") == {
        ("none", "none"): 1,
        (first, "pair"): 3,
        (first, "user_mean"): 1,
        (first, "none"): 1,
        (second, "user_mean"): 1,
        (second, "none"): 1,
        (second, "pair"): 1,
    }
    assert counts("all", "shown") == {
        ("none", "none"): 1,
        (first, "pair"): 1,
        (first, "user_mean"): 1,
        (first, "none"): 1,
        (second, "user_mean"): 1,
    }
    assert counts("feed", "scored") == {
        ("none", "none"): 1,
        (first, "pair"): 2,
        (first, "user_mean"): 1,
        (first, "none"): 1,
        (second, "pair"): 1,
    }
    assert counts("reels", "scored") == {(first, "pair"): 1, (second, "user_mean"): 1}
    assert counts("all", "scored", "user:hot") == {
        ("none", "none"): 1,
        (first, "pair"): 3,
        (first, "user_mean"): 1,
        (second, "user_mean"): 1,
        (second, "pair"): 1,
    }
    assert counts("all", "scored", "user:regular") == {(first, "none"): 1}
    assert counts("all", "scored", "user:new") == {(second, "none"): 1}
    assert counts("all", "scored", "item:new") == {
        ("none", "none"): 1,
        (first, "pair"): 2,
        (second, "user_mean"): 1,
    }
    assert counts("all", "scored", "item:regular") == {
        (first, "none"): 1,
        (first, "pair"): 1,
        (second, "none"): 1,
        (second, "pair"): 1,
    }
    assert counts("all", "scored", "item:unknown") == {(first, "user_mean"): 1}
    # Every row is in one user segment and in one item segment.
    for kind in ("user:", "item:"):
        assert sum(row.rows for key, row in found.items() if key[1:3] == ("all", "scored") and kind in key[3]) == 9

    shares = defaultdict(float)
    for key, row in found.items():
        shares[key[:4]] += row.share
    assert all(total == pytest.approx(1) for total in shares.values())
    up_to = {key[::4]: row.cumulative_share for key, row in found.items() if key[1:4] == ("all", "scored", "all")}
    assert up_to == {
        ("none", "none"): 1,
        (first, "pair"): pytest.approx(3 / 5),
        (first, "user_mean"): pytest.approx(4 / 5),
        (first, "none"): 1,
        (second, "pair"): pytest.approx(1 / 3),
        (second, "user_mean"): pytest.approx(2 / 3),
        (second, "none"): 1,
    }
    pair = found[first, "all", "scored", "all", "pair"]
    # ages of 20, 20 and 60 minutes: the mean, and the 90th percentile 20 + 0.8 * 40 between the last two
    assert (pair.share, pair.mean_age_seconds, pair.p90_age_seconds) == (pytest.approx(0.6), 2000.0, 52 * 60)
    nothing = found["none", "all", "scored", "all", "none"]
    assert (nothing.mean_age_seconds, nothing.p90_age_seconds) == (None, None)

    assert report.rows_in == 9 and report.metrics == {
        "rows": 9,
        "windows": 1,
        "coverage": pytest.approx(6 / 9),
        "coverage_pair": pytest.approx(4 / 9),
        "coverage_user_mean": pytest.approx(2 / 9),
        "outcome_to_forecast": pytest.approx(7 / 5),
    }
    ledger = tables.read("precompute_ledger").collect()
    assert len(ledger) == 1
    names = (
        "predicted",
        "computed",
        "rejected",
        "reused",
        "hit",
        "wasted",
        "scored_rows",
        "covered_rows",
        "expected_rows",
        "cost",
        "seconds",
    )
    # covered: four rows of (1, 10), two of (1, 11), one of (3, 10); the refused pair's row is not
    assert tuple(ledger[0][name] for name in names) == (5, 3, 1, 1, 2, 1, 9, 7, 5.0, 15.0, None)
    assert ledger[0].predicted_at.isoformat() == "2026-01-02T18:00:00"

    # Again, with another partitioning: the slice is replaced by the same rows.
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "4")
    audit_coverage.run(*make_run("audit_coverage", AS_OF, "audit_coverage.hot_rows_a_day=24"))
    spark.conf.set("spark.sql.shuffle.partitions", before)
    again = tables.read_slice("coverage_audit", AS_OF).drop("run_id").collect()
    assert sorted(again) == sorted(tables.spark.createDataFrame(rows).drop("run_id").collect())

    # Every documented query runs on it.
    tables.register_views()
    text = QUERIES.read_text()
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    answers = {
        title: spark.sql(query).collect()
        for title, query in zip(re.findall(r"^## (.*)$", text, re.MULTILINE), queries, strict=True)
    }
    assert len(answers) == 10

    def answered(title, *names):
        return [tuple(row[name] for name in names) for row in answers[title]]

    assert answered("Coverage of each window", "rows", "coverage") == [(9, 0.6667)]
    assert answered("What each tier adds", "tier", "rows", "share", "cumulative_share") == [
        ("pair", 4, 0.4444, 0.4444),
        ("user_mean", 2, 0.2222, 0.6667),
        ("none", 3, 0.3333, 1.0),
    ]
    # shown: a pair and two means of five rows
    both = answered("Scored rows against shown rows", "scored_coverage", "shown_coverage")
    assert both == [(0.6667, 0.6)]
    # The surface that is called all can't be told from the sum.
    surfaces = answered("Coverage by surface", "surface", "rows", "pair_coverage", "coverage")
    assert surfaces == [("feed", 6, 0.5, 0.6667), ("reels", 2, 0.5, 1.0)]
    segments = answered("Which users and items are left out", "segment", "rows", "coverage", "pair_coverage")
    assert segments == [
        ("user:hot", 7, 0.8571, 0.5714),
        ("item:new", 4, 0.75, 0.5),
        ("item:regular", 4, 0.5, 0.5),
        ("item:unknown", 1, 1.0, 0.0),
        ("user:new", 1, 0.0, 0.0),
        ("user:regular", 1, 0.0, 0.0),
    ]
    # pair: 20, 20, 60 and 210 minutes; user_mean: 30 and 200
    ages = answered("How old the served embeddings are", "tier", "mean_age_hours", "worst_p90_age_hours")
    assert ages == [("pair", 1.29, 3.5), ("user_mean", 1.92, 3.33)]
    each = answered("Coverage of each snapshot", "snapshot_id", "rows", "coverage")
    assert each == [(first, 5, 0.8), (second, 3, 0.6667)]
    names = ("predicted", "covered_rows", "expected_rows", "outcome_to_forecast", "realised_coverage")
    assert answered("Forecast against outcome", *names) == [(5, 7, 5.0, 1.4, 0.7778)]
    names = ("computed", "hit", "wasted", "wasted_share", "seconds")
    assert answered("What the wasted work costs", *names) == [(3, 2, 1, 0.3333, None)]
    assert answered("Drift against the week before", "coverage", "against_week") == [(0.6667, None)]


def test_a_window_that_no_run_audited_is_audited_with_the_next_and_judged_by_none(make_run, fill, tables, window):
    """The window of the fixture was missed; in the next one all rows are covered, and in the third there are none."""
    fill("ranking_log", [log_row(4, 10, AS_OF + hours(1), request_id="pair")], AS_OF + hours(6))
    limits = ["audit_coverage.min_coverage=0.9", "quality.min_rows_for_rate=1", "audit_coverage.segments=false"]
    report = audit_coverage.run(*make_run("audit_coverage", AS_OF + hours(6), *limits))
    assert report.metrics["windows"] == 2
    late = audit_coverage.run(*make_run("audit_coverage", AS_OF + hours(24), *limits))
    assert late.metrics == {"windows": 1}
    assert tables.slices("coverage_audit") == [slice_of(AS_OF), slice_of(AS_OF + hours(6))]
    rows = tables.read("coverage_audit").where("surface = 'all' AND segment = 'all' AND population = 'scored'")
    found = {
        name: sum(row.rows for row in rows.where(F.col("slice") == name).collect())
        for name in tables.slices("coverage_audit")
    }
    assert found == {slice_of(AS_OF): 9, slice_of(AS_OF + hours(6)): 1}
    assert [row.slice for row in tables.read("precompute_ledger").collect()] == [slice_of(AS_OF)]


def test_a_coverage_below_the_limit_fails_after_the_audit_is_written(make_run, tables, window):
    # where a snapshot was live: 6 of 8 rows covered, 4 by their own pair
    limits = ["audit_coverage.segments=false", "quality.min_rows_for_rate=8"]
    audit_coverage.run(
        *make_run(
            "audit_coverage", AS_OF, *limits, "audit_coverage.min_coverage=0.75", "audit_coverage.min_pair_coverage=0.5"
        )
    )
    tables.replace(tables.read_slice("coverage_audit", AS_OF).limit(0), "coverage_audit", slice="20260103T000000Z")
    with pytest.raises(RunFailed, match=r"0\.7500 is below audit_coverage\.min_coverage = 0\.76"):
        audit_coverage.run(*make_run("audit_coverage", AS_OF, *limits, "audit_coverage.min_coverage=0.76"))
    assert {row.segment for row in tables.read_slice("coverage_audit", AS_OF).collect()} == {"all"}


def test_a_drop_against_the_week_before_and_an_outcome_below_its_forecast_fail_the_run(make_run, fill, window):
    limits = ["audit_coverage.segments=false", "quality.min_rows_for_rate=8"]

    def run(*more):
        return audit_coverage.run(*make_run("audit_coverage", AS_OF, *limits, *more))

    def earlier(back, covered, bare, **more):
        at = AS_OF - hours(back)
        row = {"window_start": at - hours(6), "window_end": at, "surface": "all", "population": "scored"}
        row |= {"snapshot_id": "s", "segment": "all", "share": 0.5, **more}
        tiers = {"pair": covered, "cold": bare // 2, "none": bare - bare // 2}  # cold is covered by nothing of its own
        fill("coverage_audit", [{**row, "tier": tier, "rows": rows} for tier, rows in tiers.items()], at)

    earlier(6, 180, 20)
    earlier(12, 60, 40)
    earlier(18, 0, 500, snapshot_id="none")  # before the first snapshot: nothing to fall from
    earlier(24 * 7, 0, 1000)  # a week ago to the hour: out of the week
    # the week: 240 of 300 rows; this window: 6 of the 8 with a live snapshot; covered 7 where 5 were forecast
    assert run("audit_coverage.max_drop=0.06", "audit_coverage.min_outcome=1.4").metrics["coverage_week"] == 0.8
    with pytest.raises(
        RunFailed, match=r"0\.7500 is 0\.0500 below that of the week .* audit_coverage\.max_drop = 0\.04"
    ):
        run("audit_coverage.max_drop=0.04")
    with pytest.raises(RunFailed, match=r"1\.400 times those forecast.*audit_coverage\.min_outcome = 1\.5"):
        run("audit_coverage.min_outcome=1.5")


def test_a_window_without_snapshots_or_rows_is_audited_too(make_run, fill, tables):
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(1)), log_row(1, 11, AS_OF - hours(1), shown=False)], AS_OF)
    report = audit_coverage.run(
        *make_run("audit_coverage", AS_OF, "audit_coverage.min_coverage=1", "quality.min_rows_for_rate=1")
    )
    rows = tables.read_slice("coverage_audit", AS_OF).collect()
    assert {(row.snapshot_id, row.tier, row.share) for row in rows} == {("none", "none", 1.0)}
    assert report.metrics == {"rows": 2, "coverage": 0.0, "windows": 1}
    assert not tables.exists("precompute_ledger")
    empty = audit_coverage.run(*make_run("audit_coverage", AS_OF + hours(6)))
    assert (empty.rows_in, empty.rows_out, empty.metrics) == (0, 0, {"windows": 1})


@pytest.mark.parametrize("seed", range(3))
def test_every_predicted_pair_ends_in_exactly_one_state(spark, seed):
    draw = random.Random(seed)
    pairs = [(user, item) for user in range(-2, 4) for item in range(6)]
    # Some embeddings are of no candidate, some candidates have none, pairs are scored that nobody predicted.
    chosen = {pair: draw.choice(["compute", "compute", "reuse"]) for pair in draw.sample(pairs, 20)}
    embedded = {pair for pair in pairs if draw.random() < 0.5}
    scored = draw.choices(pairs, k=30)
    states: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for pair, action in chosen.items():
        if action == "reuse":
            states["reused"].add(pair)
        elif pair not in embedded:
            states["rejected"].add(pair)
        else:
            states["hit" if pair in scored else "wasted"].add(pair)
    candidates = spark.createDataFrame(
        [(*pair, action, 2.0 if action == "compute" else 0.0, 0.25) for pair, action in chosen.items()],
        "user_id BIGINT, item_id BIGINT, action STRING, cost DOUBLE, expected_rows DOUBLE",
    )
    rows = [spark.createDataFrame(list(part), "user_id BIGINT, item_id BIGINT") for part in (embedded, scored)]
    ledger = audit_coverage.reconcile(candidates, *rows, SIX).first()
    assert {name: ledger[name] for name in ("reused", "rejected", "hit", "wasted")} == {
        name: len(states[name]) for name in ("reused", "rejected", "hit", "wasted")
    }
    assert ledger.predicted == 20 == ledger.hit + ledger.wasted + ledger.reused + ledger.rejected
    answered = states["reused"] | states["hit"] | states["wasted"]
    assert (ledger.scored_rows, ledger.covered_rows) == (30, sum(pair in answered for pair in scored))
    assert ledger.cost == 2.0 * len(states["hit"] | states["wasted"]) and ledger.expected_rows == 5.0
