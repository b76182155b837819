import math
from datetime import timedelta

import numpy as np
import pytest
from pyspark.sql import functions as F

from jobs.common.candidates import CandidateSettings, candidates
from jobs.common.clock import micros, slice_of
from jobs.common.pair_features import FEATURES, features
from jobs.common.pair_statistics import Horizon, log_rows, open_view
from solaris_udf.snapshot import Lookup, MissLog
from tests.conftest import AS_OF, hours, log_row

HORIZON = Horizon(window=6.0, lookback=168.0, half_life=12.0, ttl=24.0)
LATER = AS_OF + hours(6)


class Candidates(CandidateSettings):
    """The settings on their own, as a section."""

    section = "candidates"


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def basket(user, items, at, **more):
    return [log_row(user, item, at, **more) for item in items]


@pytest.fixture
def known(fill):
    """User 1 has three requests; user 2 two with the items of user 1's first; user 3 a hundred rows of old."""
    rows = [
        *basket(1, [10, 11], AS_OF - minutes(30), clicked=True),
        *basket(1, [10], AS_OF - hours(5)),
        *basket(1, [10, 12], AS_OF - hours(20), shown=False),
        *basket(2, [10, 11, 13], AS_OF - hours(2)),
        *basket(2, [10, 11, 13], AS_OF - hours(3)),
        *(log_row(3, item, AS_OF - hours(100) - minutes(item)) for item in range(100)),
        *basket(4, [14], AS_OF - hours(200)),
    ]
    # One load of everything: the slice is later than the reference times that the trainer looks from.
    fill("ranking_log", rows, LATER)
    fill(
        "items",
        [
            {"item_id": 10, "category_id": 1, "advertiser_id": 7, "created_at": AS_OF - hours(48)},
            {"item_id": 11, "category_id": 1},
            {"item_id": 12, "category_id": 2},
            {"item_id": 20, "category_id": 1, "created_at": AS_OF - hours(1)},
            {"item_id": 21, "advertiser_id": 7, "created_at": AS_OF - hours(2)},
            {"item_id": 22, "category_id": 9, "created_at": AS_OF - hours(1)},
            {"item_id": 23, "category_id": 1, "created_at": AS_OF},
            {"item_id": 24, "category_id": 1, "created_at": AS_OF - hours(25)},
        ],
        LATER,
    )
    fill(
        "pair_embeddings",
        [
            {"user_id": 1, "item_id": 11, "embedding": b"00"},
            {"user_id": 2, "item_id": 10, "embedding": b"00"},
        ],
        AS_OF - hours(6),
    )
    # Too late to have answered the last window, and expired when it began.
    fill("pair_embeddings", [{"user_id": 1, "item_id": 10, "embedding": b"00"}], AS_OF)
    fill("pair_embeddings", [{"user_id": 2, "item_id": 11, "embedding": b"00"}], AS_OF - hours(30))


def test_sources_name_what_they_say_and_a_pair_keeps_them_all(tables, known):
    with open_view(tables, [AS_OF], HORIZON, LATER) as view:
        found = {(row.user_id, row.item_id): row.sources for row in candidates(view, Candidates()).collect()}
        capped = candidates(view, Candidates(sources={"recent": 2, "misses": 1}, max_candidates_per_user=2)).collect()
    assert found == {
        (1, 10): ["cooccurrence", "misses", "recent"],
        (1, 11): ["cooccurrence", "recent"],  # has an embedding
        (1, 12): ["recent"],
        (1, 13): ["cooccurrence"],  # comes with 10 and 11 twice
        (1, 20): ["new_items"],
        (1, 21): ["new_items"],
        (2, 10): ["cooccurrence", "recent"],
        (2, 11): ["cooccurrence", "misses", "recent"],
        (2, 13): ["cooccurrence", "misses", "recent"],
        (2, 20): ["new_items"],
        (2, 21): ["new_items"],
        (3, 20): ["new_items"],  # met these tastes long ago, and nothing else is recent
        (3, 21): ["new_items"],
        (3, 22): ["new_items"],
    }
    # By decayed frequency: 2^(-0.5/12) + 2^(-5/12) + 2^(-20/12) for item 10. User 2's items are even: the lower ids.
    assert {(row.user_id, row.item_id, *row.sources) for row in capped} == {
        (1, 10, "misses", "recent"),
        (1, 11, "recent"),
        (2, 10, "recent"),
        (2, 11, "misses", "recent"),
    }


def test_features_are_what_the_log_says(tables, known):
    with open_view(tables, [AS_OF], HORIZON, LATER) as view:
        found = {
            (row.user_id, row.item_id): row.asDict() for row in features(view, candidates(view, Candidates())).collect()
        }
    assert all(row[name] is not None for row in found.values() for name in FEATURES)
    pair = found[1, 10]
    expected = {
        "rows_1h": 1,
        "rows_6h": 2,
        "rows_24h": 3,
        "rows": 3,
        "shown": 2,
        "clicked": 1,
        "shown_24h": 2,
        "decayed": sum(2 ** (-age / 12) for age in (0.5, 5, 20)),
        "hours_since_last": 0.5,
        "hours_since_first": 20,
        "requests_since_last": 0,
        "requests_since_first": 2,
        "share_since_first": 1,
        "seen": 1,
        "requests_1h": 1,
        "requests_6h": 2,
        "requests_24h": 3,
        "requests_per_day": 3,
        "user_hours": 20,
        # 00:00 to 06:00 comes; of the requests at 23:30, 19:00 and 04:00 the day before one was in these hours.
        "expected_requests": 1,
        "rows_per_request": 5 / 3,
        "pairs_24h": 3,
        "repeats_24h": 5 / 3,
        "renewed_24h": 1,
        "renewed_6h": 0.5,
        "item_rows_1h": 1,
        "item_rows_6h": 4,
        "item_rows_24h": 5,
        "item_age_hours": 48,
        "item_age_known": 1,
        "item_hours_since_last": 0.5,
        "advertiser_share": 1,
        "from_recent": 1,
        "from_cooccurrence": 1,
        "from_rising": 0,
        "from_new_items": 0,
    }
    assert {name: pair[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    # Requests of 30 min, 5 h and 20 h ago stand in the middle of their ten minutes; the window's middle is 3 h ahead.
    angles = [2 * math.pi * (minutes_ago + 180) / 1440 for minutes_ago in (25, 295, 1195)]
    for name, wave, times in (("cos_1", math.cos, 1), ("sin_1", math.sin, 1), ("cos_2", math.cos, 2)):
        assert pair[f"day_{name}"] == pytest.approx(sum(wave(times * angle) for angle in angles) / (3 + 5), abs=1e-5)
    slow = {
        item: sum(2 ** (-age / 48) for age in ages) for item, ages in {10: (0.5, 5, 20), 11: (0.5,), 12: (20,)}.items()
    }
    assert pair["category_share"] == pytest.approx((slow[10] + slow[11]) / sum(slow.values()), abs=1e-5)
    assert (found[1, 12]["requests_since_last"], found[1, 12]["share_since_first"]) == (2, pytest.approx(1 / 3))
    never = found[1, 20]
    assert {
        name: never[name]
        for name in (
            "rows",
            "seen",
            "hours_since_last",
            "requests_since_last",
            "item_rows_24h",
            "item_age_hours",
            "from_new_items",
        )
    } == {
        "rows": 0,
        "seen": 0,
        "hours_since_last": 168,
        "requests_since_last": 3,
        "item_rows_24h": 0,
        "item_age_hours": 1,
        "from_new_items": 1,
    }
    assert found[2, 13]["category_share"] == 0  # unknown category


def test_rising_items_reach_every_active_user(tables, fill):
    fill(
        "ranking_log",
        [
            *(log_row(user, 50, AS_OF - hours(1)) for user in range(10)),
            *(log_row(user, 51, AS_OF - hours(1)) for user in range(4)),
            log_row(99, 52, AS_OF - hours(100)),
        ],
    )
    with open_view(tables, [AS_OF], HORIZON, AS_OF) as view:
        found = candidates(view, Candidates(sources={"rising": 3})).collect()
    assert {(row.user_id, row.item_id) for row in found} == {(user, 50) for user in (*range(10), 99)}


def test_items_rise_within_the_cluster_that_was_known_before(tables, fill):
    def cluster(users, number):
        known = {"cluster_id": number, "neighbors": [], "embedding_at": AS_OF - hours(40)}
        return [{"user_id": user, **known} for user in users]

    fill("user_neighbors", [*cluster(range(8), 1), *cluster(range(8, 20), 0)], AS_OF - hours(30))
    fill("user_neighbors", [*cluster(range(8), 0), *cluster(range(8, 16), 1)], AS_OF - hours(6))
    # Of this very time: a retry of predict_pairs would see it, the first try did not.
    fill("user_neighbors", cluster(range(20), 5), AS_OF)
    fill(
        "ranking_log",
        [
            *(log_row(user, 50, AS_OF - hours(1)) for user in range(6)),  # six users of cluster 0
            *(log_row(user, 51, AS_OF - hours(2)) for user in range(8, 15)),  # seven of cluster 1
            *(log_row(user, 52, AS_OF - hours(2)) for user in (0, 1, 2, 3, 8, 9, 10, 11)),  # four of each: too few
            *(log_row(user, 53, AS_OF - hours(5)) for user in range(16, 20)),  # no longer in any cluster
        ],
    )
    with open_view(tables, [AS_OF], HORIZON, AS_OF) as view:
        found = candidates(view, Candidates(sources={"cluster_rising": 3})).collect()
        capped = candidates(view, Candidates(sources={"cluster_rising": 3, "rising": 1})).where("user_id = 8").collect()
    active = {0: range(6), 1: range(8, 15)}
    assert {(row.user_id, row.item_id) for row in found} == {
        *((user, 50) for user in active[0]),
        *((user, 51) for user in active[1]),
    }
    # Item 52 rose most over all users, and a pair keeps both of its sources.
    assert {(row.item_id, *row.sources) for row in capped} == {(51, "cluster_rising"), (52, "rising")}


def test_each_reference_time_sees_its_own_past(tables, fill):
    fill(
        "ranking_log",
        [
            log_row(1, 1, AS_OF - hours(13)),
            log_row(1, 2, AS_OF - hours(12)),
            log_row(1, 3, AS_OF - hours(1)),
            log_row(1, 6, AS_OF),
            log_row(1, 4, AS_OF - hours(2), arrived_at=AS_OF + hours(1)),
            log_row(1, 5, AS_OF - hours(37)),
        ],
        LATER,
    )
    times = [AS_OF, AS_OF - hours(6), AS_OF - hours(12)]

    def seen(read_at):
        found: dict[int, set[int]] = {}
        for row in log_rows(tables, times, 24.0, read_at).collect():
            found.setdefault(row["at"], set()).add(row.item_id)
        return [found.get(micros(time)) for time in times]

    assert seen(LATER) == [{1, 2, 3}, {1, 2}, {1}]
    assert seen(AS_OF) == [None, None, None]  # the load had not happened


def test_one_user_with_a_fifth_of_all_rows_is_bounded(tables, spark):
    """Such a user weighs on no task more than the bound: what is kept of a user never exceeds pairs_per_user."""
    many = spark.range(3000).select(
        F.lit(slice_of(AS_OF)).alias("slice"),
        F.lit(AS_OF).alias("as_of"),
        F.lit("test").alias("run_id"),
        F.concat(F.lit("r"), F.floor(F.col("id") / 15)).alias("request_id"),
        (F.lit(AS_OF) - F.make_dt_interval(secs=F.col("id") + 1)).alias("event_time"),
        F.lit(AS_OF - minutes(0)).alias("arrived_at"),
        F.when(F.col("id") % 5 == 0, 0).otherwise(F.col("id")).alias("user_id"),
        F.col("id").alias("item_id"),
        F.lit("feed").alias("surface"),
        F.lit(None).cast("int").alias("position"),
        F.lit(True).alias("shown"),
        F.lit(False).alias("clicked"),
        F.lit(None).cast("map<string,double>").alias("labels"),
        F.lit(None).cast("binary").alias("served_embedding"),
        F.lit(None).cast("string").alias("user_group"),
    )
    tables.replace(many, "ranking_log", slice=slice_of(AS_OF))
    with open_view(tables, [AS_OF], Horizon(6.0, 168.0, 12.0, 24.0, pairs_per_user=50), AS_OF) as view:
        assert view.pairs.where("user_id = 0").count() == 50
        named = candidates(view, Candidates(sources={"recent": 40, "rising": 10}, max_candidates_per_user=30))
        assert named.where("user_id = 0").count() == 30
        assert {row.item_id for row in named.where("user_id = 0").collect()} == set(range(0, 150, 5))  # the latest


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sources": {"recents": 5}}, "unknown sources"),
        ({"sources": {}}, "at least one source"),
        ({"sources": {"recent": 0}}, "cap of 1"),
        ({"recent_hours": 200.0}, "more than lookback_hours"),
    ],
)
def test_settings_that_can_not_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Candidates(**change)


def test_lookup_misses_come_from_the_hosts_files_of_the_last_window(tables, fill, tmp_path):
    fill("ranking_log", basket(1, [10], AS_OF - hours(1)))
    settings = Candidates(sources={"lookup_misses": 2}, miss_log=str(tmp_path / "misses"))

    def named():
        with open_view(tables, [AS_OF], HORIZON, AS_OF) as view:
            return sorted((row.user_id, row.item_id, *row.sources) for row in candidates(view, settings).collect())

    assert named() == []  # no host has written yet

    def miss(log, *keys):
        """Notes (user, item, microseconds before AS_OF)."""
        users, items, before = (np.array(column) for column in zip(*keys, strict=True))
        log.add(users, items, micros(AS_OF) - before, Lookup.empty(len(keys), 1, 0))
        log.flush()

    whole = MissLog(tmp_path / "misses", share=1)
    window = 6 * 3_600_000_000
    miss(whole, (1, 5, 1), (1, 5, 2), (1, 6, 1), (1, 7, 3), (2, 8, window))
    miss(whole, (3, 9, 0), (3, 9, window + 1))  # at as_of, and before the window
    # 5 twice, then 6 before 7 by the later miss; two a user.
    assert named() == [(1, 5, "lookup_misses"), (1, 6, "lookup_misses"), (2, 8, "lookup_misses")]
    # A host that keeps a part: each of its misses stands for many.
    heavy = MissLog(tmp_path / "misses", share=0.5)
    while heavy.flush() == 0:
        heavy.add(np.array([1]), np.array([7]), np.array([micros(AS_OF) - 5]), Lookup.empty(1, 1, 0))
    assert named() == [(1, 5, "lookup_misses"), (1, 7, "lookup_misses"), (2, 8, "lookup_misses")]


def test_lookup_misses_without_a_folder_are_refused():
    with pytest.raises(ValueError, match="miss_log, which is not set"):
        Candidates(sources={"lookup_misses": 2})
