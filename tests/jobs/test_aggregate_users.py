from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from jobs import aggregate_users
from jobs.common.clock import parse_as_of
from jobs.common.errors import RunFailed, UserError
from solaris_udf.codec import decode, encode
from tests.conftest import AS_OF, IN_ZONES, hours

LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def pair(user, item, vector, **more):
    return {"user_id": user, "item_id": item, "embedding": encode([vector])[0].as_py(), **more}


@pytest.fixture
def embeddings(fill):
    """Five slices around the ends of the 24 h before AS_OF."""
    fill("pair_embeddings", [pair(1, 1, [100, 100])], AS_OF - hours(24))  # exactly 24 h: too old
    fill(
        "pair_embeddings",
        [
            pair(1, 1, [1, 0]),
            pair(1, 2, [0, 3], probability=0.25),
            pair(LARGEST, 7, [5, 5]),
            pair(3, 7, [0, 0], embedding=np.array([np.inf, 0], "<f2").tobytes()),
            pair(4, 1, [8, 8], model_version="m0"),
        ],
        AS_OF - hours(18),
    )
    fill(
        "pair_embeddings",
        [
            pair(1, 1, [3, 1], probability=None),
            pair(SMALLEST, -2, [2, -2]),
            pair(SMALLEST, 9, [0, 0], embedding=encode([[127, 0]], "int8")[0].as_py(), codec="int8"),
        ],
        AS_OF,
    )
    fill("pair_embeddings", [pair(1, 1, [50, 50])], AS_OF + hours(6))  # the future
    return AS_OF


def rows_of(tables, as_of=AS_OF):
    rows = tables.read_slice("user_embeddings", as_of).orderBy("user_id").collect()
    return {row.user_id: row for row in rows}


def use_model(monkeypatch, version):
    """A newest foundation model of that version, without building one."""
    monkeypatch.setattr("jobs.common.versions.served_model", lambda _: SimpleNamespace(version=version))


def test_means_of_the_latest_embedding_per_pair_of_the_window(make_run, tables, embeddings, monkeypatch, spark):
    use_model(monkeypatch, "m1")
    report = aggregate_users.run(*make_run("aggregate_users"))
    rows = rows_of(tables)
    found = {user: (decode([row.embedding])[0].tolist(), row.pair_count) for user, row in rows.items()}
    assert found == {1: ([1.5, 2], 2), LARGEST: ([5, 5], 1), SMALLEST: ([64.5, -1], 2)}
    newest = {user: rows[user].newest_at for user in (1, LARGEST)}
    assert newest == {1: AS_OF.replace(tzinfo=None), LARGEST: (AS_OF - hours(18)).replace(tzinfo=None)}
    assert {(row.codec, row.model_version) for row in rows.values()} == {("float16", "m1")}
    refused = [(row.source, row.reason) for row in tables.read("rejected_rows").collect()]
    assert refused == [("aggregate_users", "the stored embedding has a NaN or an Inf")]
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (6, 3, 1)
    assert report.metrics["pairs_per_user"] == pytest.approx(5 / 3)

    # Other partitioning, then decay and weights, replace the slice: m1's pair (1, 1) is 0 h old, (1, 2) 18 h.
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "5")
    aggregate_users.run(*make_run("aggregate_users"))
    spark.conf.set("spark.sql.shuffle.partitions", before)
    again = rows_of(tables)
    assert {user: row.embedding for user, row in again.items()} == {user: row.embedding for user, row in rows.items()}
    aggregate_users.run(
        *make_run(
            "aggregate_users", AS_OF, "aggregate_users.half_life_hours=18", "aggregate_users.weight_by_probability=true"
        )
    )
    weighted = (np.array([3, 1]) * 1 + np.array([0, 3]) * 0.5 * 0.25) / 1.125
    assert decode([rows_of(tables)[1].embedding])[0] == pytest.approx(weighted, rel=1e-3)

    # The share of refused rows is judged before anything is written.
    with pytest.raises(RunFailed, match="1 of 6 rows were rejected"):
        aggregate_users.run(
            *make_run("aggregate_users", AS_OF, "quality.min_rows_for_rate=1", "quality.max_reject_rate=0.1")
        )
    assert len(rows_of(tables)) == 3

    # A model without embeddings yet, and a window without any: an empty slice, and what was rejected before is cleared.
    use_model(monkeypatch, "m9")
    report = aggregate_users.run(*make_run("aggregate_users"))
    assert (report.rows_in, report.rows_out) == (0, 0)
    assert rows_of(tables) == {} and tables.read("rejected_rows").count() == 0


def test_without_a_model_the_window_must_hold_one_version(make_run, tables, embeddings):
    with pytest.raises(UserError, match="several model versions \\(m0, m1\\)"):
        aggregate_users.run(*make_run("aggregate_users"))
    report = aggregate_users.run(*make_run("aggregate_users", AS_OF, "serving.user_mean_hours=18"))  # AS_OF only
    assert report.rows_out == 2 and set(rows_of(tables)) == {1, SMALLEST}
    assert aggregate_users.run(*make_run("aggregate_users", AS_OF - hours(48))).rows_out == 0


@IN_ZONES
def test_the_window_is_24_hours_long_on_any_day_in_any_zone(make_run, tables, fill, zone, as_of):
    at, second = parse_as_of(as_of), timedelta(seconds=1)
    days = {at - hours(24): 100, at - hours(24) + second: 1, at: 3, at + second: 50}
    for moment, value in days.items():
        fill("pair_embeddings", [pair(1, value, [value])], moment)
    for incremental in ("true", "false"):
        aggregate_users.run(*make_run("aggregate_users", at, f"aggregate_users.incremental={incremental}"))
        (row,) = tables.read_slice("user_embeddings", at).selectExpr("*", "unix_seconds(newest_at) AS newest").collect()
        assert (decode([row.embedding])[0].tolist(), row.pair_count) == ([2], 2)
        assert row.newest == at.timestamp()


def test_sums_kept_per_slice_give_the_means_of_a_full_recomputation(make_run, tables, fill):
    draw = np.random.default_rng(3)
    settings = ["aggregate_users.half_life_hours=18", "aggregate_users.weight_by_probability=true"]

    def embed(step, run="embed"):
        pairs = [(user, item) for user in range(8) for item in range(6) if draw.random() < 0.5 and (user + step) % 4]
        rows = [
            pair(user, item, draw.normal(size=3), probability=float(draw.random()), run_id=f"{run} {step}")
            for user, item in pairs
        ]
        fill("pair_embeddings", rows, AS_OF + hours(6 * step))
        return len(rows)

    def incremental(step, *more):
        return aggregate_users.run(*make_run("aggregate_users", AS_OF + hours(6 * step), *settings, *more))

    def assert_equal_to_full(step):
        at = AS_OF + hours(6 * step)
        found = rows_of(tables, at)
        incremental(step, "aggregate_users.incremental=false")
        expected = rows_of(tables, at)
        assert found.keys() == expected.keys() and len(found) > 4
        for user, row in expected.items():
            exact, kept = decode([row.embedding])[0], decode([found[user].embedding])[0]
            assert kept == pytest.approx(exact, rel=1e-3, abs=1e-3)  # a float16 step
            assert (found[user].pair_count, found[user].newest_at) == (row.pair_count, row.newest_at)

    for step in range(6):  # the window of 24 h holds four slices: the first ones leave it
        added = embed(step)
        report = incremental(step)
        assert (report.metrics["full"], report.rows_in) == (float(step == 0), added)
    assert incremental(5).rows_in == added  # a retry
    assert_equal_to_full(5)
    # A slice of the window is embedded again, or one is missing: everything is read anew, then it goes on.
    embed(4, run="again")
    assert incremental(5).metrics["full"] == 1.0
    assert_equal_to_full(5)
    for step in (6, 7):
        embed(step)
    assert incremental(7).metrics["full"] == 1.0
    embed(8)
    assert incremental(8).metrics["full"] == 0.0
    assert_equal_to_full(8)
    assert incremental(8, "serving.user_mean_hours=12").metrics["full"] == 1.0  # another window
