import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from jobs import join_features
from jobs.common.clock import micros, slice_of, ts
from jobs.common.errors import RunFailed, UserError
from jobs.common.live_snapshots import Period, live_periods, period_index, without_null_lists
from solaris_udf import served
from solaris_udf.codec import decode, encode
from solaris_udf.snapshot import Snapshot
from tests.conftest import AS_OF, hours, log_row
from tests.jobs.snapshots import Pair, User, snapshot_row, vector, write_snapshot

EVALUATION = Path(__file__).parents[2] / "docs" / "evaluation.md"
NOON, SIX, TEN_MINUTES = AS_OF - hours(12), AS_OF - hours(6), timedelta(minutes=10)
FIRST = {(1, 10): vector(1, 0), 1: vector(0, 1)}
SECOND = {(1, 10): vector(2, 0), (1, 11): vector(0, 2), 1: vector(3, 3)}


@pytest.fixture
def snapshots(root, fill):
    """One live from 12:10, one from 18:10, and one of the run's own slice, whose pair nobody may see yet."""
    ids = []
    for as_of, pairs, mean in (
        (NOON, [Pair(1, 10, NOON, FIRST[1, 10])], FIRST[1]),
        (SIX, [Pair(1, 10, SIX, SECOND[1, 10]), Pair(1, 11, SIX, SECOND[1, 11])], SECOND[1]),
        (AS_OF, [Pair(1, 10, AS_OF, vector(9)), Pair(1, 12, AS_OF, vector(9))], vector(9)),
    ):
        users = [User(1, as_of, mean), User(2, as_of, mean, source=1, similarity=0.75, neighbors=[(1, 0.75)])]
        name = write_snapshot(root, as_of, pairs, users, ttl_hours=8)
        fill("snapshots", [snapshot_row(name, as_of + TEN_MINUTES)], as_of)
        ids.append(name)
    return ids


def test_each_row_gets_what_the_snapshot_of_its_time_would_have_served(root, make_run, fill, tables, spark, snapshots):
    at = {
        "before the switch": (1, 10, SIX + timedelta(minutes=9, seconds=59), True),
        "at the switch": (1, 10, SIX + TEN_MINUTES, True),
        "not yet computed": (1, 11, SIX + timedelta(minutes=5), True),
        "computed": (1, 11, SIX + hours(2), False),
        "computed later only": (1, 12, AS_OF - timedelta(seconds=1), True),
        "expired": (1, 10, SIX, True),
        "neighbour's pair": (2, 11, SIX + hours(1), True),
        "neighbour's mean": (2, 12, SIX + hours(1), True),
        "stranger": (2**62, 10, SIX + hours(1), True),
    }
    kept = {"rating": 4.0, "conversion": 0.0}
    rows = [
        log_row(user, item, when, request_id=name, shown=shown, position=3, labels=kept)
        for name, (user, item, when, shown) in at.items()
    ]
    rows[5] = log_row(1, 10, SIX, request_id="expired", clicked=True)
    late_row = log_row(1, 10, AS_OF - hours(1), request_id="late", arrived_at=AS_OF + hours(1))
    fill("ranking_log", [*rows, log_row(1, 10, SIX - timedelta(seconds=1), request_id="earlier")], AS_OF)
    fill("ranking_log", [late_row, log_row(1, 10, AS_OF, request_id="future")], AS_OF + hours(6))

    def event(name, label, value, occurred, arrived):
        return {
            "request_id": name,
            "item_id": at[name][1],
            "label": label,
            "value": value,
            "occurred_at": occurred,
            "arrived_at": arrived,
        }

    fill(
        "label_events",
        [
            event("at the switch", "conversion", 1.0, AS_OF - hours(2), AS_OF - hours(1)),
            event("at the switch", "revenue", 2.0, AS_OF - hours(3), AS_OF),
            event("at the switch", "revenue", 7.0, AS_OF - hours(2), AS_OF),
        ],
        AS_OF,
    )
    fill("label_events", [event("stranger", "conversion", 1.0, AS_OF - hours(1), AS_OF + hours(1))], AS_OF + hours(6))

    run, settings = make_run("join_features", AS_OF, "join_features.catch_up_hours=0")
    report = join_features.run(run, settings)
    found = {row.request_id: row for row in tables.read_slice("training_rows", AS_OF).collect()}
    assert set(found) == set(at) and (report.rows_in, report.rows_out) == (9, 9)
    assert report.metrics == {"snapshots": 2, "windows": 1}

    noon, six, _ = snapshots
    hour = 3600
    expected = {  # snapshot, tier, vector, age, similarity, user tier, user vector, user age, user similarity
        "before the switch": (noon, "pair", FIRST[1, 10], 6 * hour + 599, 1, "user_mean", FIRST[1], 6 * hour + 599, 1),
        "at the switch": (six, "pair", SECOND[1, 10], 600, 1, "user_mean", SECOND[1], 600, 1),
        "not yet computed": (noon, "user_mean", FIRST[1], 6 * hour + 300, 1, "user_mean", FIRST[1], 6 * hour + 300, 1),
        "computed": (six, "pair", SECOND[1, 11], 2 * hour, 1, "user_mean", SECOND[1], 2 * hour, 1),
        "computed later only": (six, "user_mean", SECOND[1], 6 * hour - 1, 1, "user_mean", SECOND[1], 6 * hour - 1, 1),
        "expired": (noon, "pair", FIRST[1, 10], 6 * hour, 1, "user_mean", FIRST[1], 6 * hour, 1),
        "neighbour's pair": (six, "neighbor_pair", SECOND[1, 11], hour, 0.75, "neighbor_mean", SECOND[1], hour, 0.75),
        "neighbour's mean": (six, "neighbor_mean", SECOND[1], hour, 0.75, "neighbor_mean", SECOND[1], hour, 0.75),
        "stranger": (six, "none", None, -1, 0, "none", None, -1, 0),
    }

    def vector_of(packed):
        return None if packed is None else decode([bytes(packed)])[0].tolist()

    for name, row in found.items():
        assert (
            row.snapshot_id,
            row.tier,
            vector_of(row.embedding),
            row.age_seconds,
            row.similarity,
            row.user_tier,
            vector_of(row.user_embedding),
            row.user_age_seconds,
            row.user_similarity,
        ) == expected[name], name
        assert row.model_version == "m1"
    assert found["at the switch"].labels == {"rating": 4.0, "conversion": 1.0, "revenue": 7.0}
    assert found["stranger"].labels == kept and found["expired"].labels is None
    assert (found["expired"].clicked, found["computed"].shown, found["computed"].position) == (True, False, 3)

    # The same rows however they are cut, and when the slice is joined again.
    first = sorted(tables.read_slice("training_rows", AS_OF).drop("run_id").collect(), key=lambda row: row.request_id)
    before = spark.conf.get("spark.sql.shuffle.partitions")
    for partitions in ("1", "4"):
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        join_features.run(*make_run("join_features", AS_OF))
        again = tables.read_slice("training_rows", AS_OF).drop("run_id").collect()
        assert sorted(again, key=lambda row: row.request_id) == first
    spark.conf.set("spark.sql.shuffle.partitions", before)


def test_null_and_empty_lists_come_back_from_python_as_they_went(spark):
    rows = [(1, None, None), (2, {}, []), (3, {"buy": 2.0, "gone": None}, [7, None]), (4, None, [])]
    frame = spark.createDataFrame(rows, "id BIGINT, labels MAP<STRING, DOUBLE>, items ARRAY<BIGINT>")
    filled, as_before = without_null_lists(frame)
    assert filled.where("labels IS NULL OR items IS NULL").isEmpty()
    back = as_before(filled.mapInArrow(lambda batches: batches, filled.schema))
    assert back.schema == frame.schema
    assert sorted(map(tuple, back.collect())) == rows


def test_without_a_snapshot_rows_are_joined_with_nothing(make_run, fill, tables):
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(1))], AS_OF)
    join_features.run(*make_run("join_features", AS_OF))
    row = tables.read("training_rows").collect()[0]
    assert (row.snapshot_id, row.model_version, row.tier, row.embedding) == (None, None, "none", None)
    assert (row.age_seconds, row.similarity, row.user_age_seconds) == (-1, 0.0, -1)
    assert (row.user_tier, row.user_embedding, row.labels) == ("none", None, None)
    empty = join_features.run(*make_run("join_features", AS_OF + hours(6)))
    assert (empty.rows_in, empty.rows_out) == (0, 0)


def test_windows_that_were_missed_are_joined_as_they_would_have_been(make_run, fill, tables, snapshots):
    """The window to 18:00 was never joined and its rows came in with the next ingest; its snapshot was live from 12:10.
    The one to 12:00 had no snapshot."""
    fill(
        "ranking_log",
        [
            log_row(1, 10, NOON - hours(1), request_id="no snapshot yet"),
            log_row(1, 10, SIX - hours(1), request_id="missed", arrived_at=SIX - hours(1)),
            log_row(1, 11, SIX - hours(1), request_id="late", arrived_at=SIX + hours(1)),
            log_row(1, 10, SIX + hours(1), request_id="own"),
        ],
        AS_OF,
    )
    report = join_features.run(*make_run("join_features", AS_OF))
    found = {row.request_id: row for row in tables.read("training_rows").collect()}
    assert {name: row.slice for name, row in found.items()} == {"missed": slice_of(SIX), "own": slice_of(AS_OF)}
    assert (found["missed"].snapshot_id, found["own"].snapshot_id) == tuple(snapshots[:2])
    assert decode([found["missed"].embedding])[0].tolist() == FIRST[1, 10]
    assert (report.rows_out, report.metrics["windows"]) == (2, 2)

    # Joined once, and not again: rows that arrive for it later stay out, as they would have.
    again = join_features.run(*make_run("join_features", AS_OF))
    assert (again.rows_out, again.metrics["windows"]) == (1, 1)


def test_no_window_is_caught_up_when_told_so(make_run, fill, tables, snapshots):
    fill("ranking_log", [log_row(1, 10, SIX - hours(1))], SIX)
    report = join_features.run(*make_run("join_features", AS_OF, "join_features.catch_up_hours=0"))
    assert (report.metrics["windows"], tables.slices("training_rows")) == (1, [])


def test_a_snapshot_whose_files_are_gone_is_named(make_run, fill):
    fill("ranking_log", [log_row(1, 10, AS_OF - hours(1))], AS_OF)
    fill("snapshots", [snapshot_row("lost", AS_OF - hours(6))], AS_OF - hours(6))
    with pytest.raises(UserError, match="snapshot lost, live from 2026-01-02T18:00:00"):
        join_features.run(*make_run("join_features", AS_OF))


def test_periods_are_those_that_cover_the_window(fill, make_run, root):
    for name, back in (("a", 30), ("b", 12), ("c", 6), ("d", 3)):
        fill("snapshots", [snapshot_row(name, AS_OF - hours(back - 1))], AS_OF - hours(back))
    fill("snapshots", [snapshot_row("e", AS_OF - hours(2))], AS_OF - hours(2.5))  # same moment as d, a later slice
    fill("snapshots", [snapshot_row("f", AS_OF)], AS_OF)

    def names(start, end, as_of=AS_OF):
        run, _ = make_run("join_features", as_of)
        return [period.snapshot_id for period in live_periods(run, start, end)]

    assert names(AS_OF - hours(6), AS_OF) == ["b", "c", "e"]
    assert names(AS_OF - hours(5), AS_OF) == ["c", "e"]
    assert names(AS_OF - hours(40), AS_OF - hours(11)) == ["a"]
    assert names(AS_OF - hours(60), AS_OF - hours(50)) == []
    assert names(AS_OF - hours(6), AS_OF, AS_OF - hours(4)) == ["b", "c"]

    # Between c and e somebody went back to b, and, after e, to a snapshot that no run exported.
    moved = "".join(f"{(AS_OF - hours(back)).isoformat()} {name}\n" for back, name in ((4, "b"), (1, "foreign")))
    (root / "snapshots").mkdir()
    (root / "snapshots" / "ROLLBACKS").write_text(moved)
    assert names(AS_OF - hours(6), AS_OF) == ["b", "c", "b", "e"]
    assert names(AS_OF - hours(3), AS_OF - hours(2.5)) == ["b"]
    assert names(AS_OF - hours(6), AS_OF, AS_OF - hours(4)) == ["b", "c"]  # not yet
    (root / "snapshots" / "ROLLBACKS").write_text("b\n")
    with pytest.raises(UserError, match="ROLLBACKS: 'b' is not a time and a snapshot id"):
        names(AS_OF - hours(6), AS_OF)


def test_the_period_of_a_time_is_the_last_that_began(spark):
    starts = np.sort(np.random.default_rng(0).choice(1000, 37, replace=False))
    periods = [Period(micros(AS_OF) + int(start), str(start), "m1") for start in starts]
    moments = spark.range(-5, 1005)
    at = F.timestamp_micros(F.lit(micros(AS_OF)) + F.col("id"))
    found = {row.id: row.place for row in moments.select("id", period_index(periods, at).alias("place")).collect()}
    assert found == {moment: int(np.searchsorted(starts, moment, side="right")) - 1 for moment in range(-5, 1005)}
    nothing = moments.limit(1).select(period_index([], ts(AS_OF)).alias("place")).collect()
    assert nothing[0].place == -1 and slice_of(AS_OF) == "20260103T000000Z"


def test_vectors_logged_online_are_compared_to_the_bit(make_run, fill, tables, snapshots):
    at = SIX + hours(1)
    stored = np.array([SECOND[1, 10]], dtype=np.float16)
    pair, other = (encode(each)[0].as_py() for each in (stored, np.nextafter(stored, np.float16(9))))
    logged = {
        "right": (1, 10, pair),
        "off by one bit": (1, 10, other),
        "rightly none": (2**62, 10, b""),
        "not logged": (1, 10, None),
        "none although there is one": (1, 10, b""),
        "one although there is none": (2**62, 10, pair),
    }
    rows = [
        log_row(user, item, at, request_id=name, served_embedding=vector)
        for name, (user, item, vector) in logged.items()
    ]
    fill("ranking_log", rows, AS_OF)
    report = join_features.run(*make_run("join_features", AS_OF))
    assert report.metrics == {"snapshots": 2, "windows": 1, "logged_vectors": 5, "mismatch_rate": pytest.approx(3 / 5)}
    with pytest.raises(RunFailed, match=r"3 of 5 rows have another vector .*max_mismatch_rate = 0\.59"):
        join_features.run(*make_run("join_features", AS_OF, "join_features.max_mismatch_rate=0.59"))
    assert tables.read_slice("training_rows", AS_OF).count() == 6
    tables.register_views()
    query = re.search(r"Which rows:\n\n```sql\n(.*?)```", EVALUATION.read_text(), re.DOTALL).group(1)
    found = tables.spark.sql(query).collect()
    assert {(row.snapshot_id, row.tier, row.rows) for row in found} == {
        (snapshots[1], "pair", 2),
        (snapshots[1], "none", 1),
    }


def test_a_worker_opens_each_snapshot_once(root, monkeypatch):
    paths = []
    for as_of in (NOON, SIX):
        name = write_snapshot(root, as_of, [Pair(1, 10, as_of, vector(1))], [User(1, as_of, vector(2))])
        paths.append(str(root / "snapshots" / name))
    opened, open_snapshot = [], Snapshot.open
    monkeypatch.setattr(served.Snapshot, "open", lambda path, **how: opened.append(path) or open_snapshot(path, **how))
    at = [micros(SIX + hours(1))] * 4

    def batches(period):
        for _ in range(20):
            yield pa.RecordBatch.from_pydict(
                {
                    "user_id": [1, 1, 1, 2],
                    "item_id": [10, 10, 11, 10],
                    "event_time": pa.array(at, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
                    "period": pa.array(period, pa.int32()),
                }
            )

    # A task's rows come ordered by snapshot; two tasks of one worker share what is open.
    for period in ([-1, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]) * 2:
        tiers = [batch["tier"].to_pylist() for batch in served.serve(batches(period), paths, vectors=True)]
        assert tiers == [["none" if period[0] < 0 else "pair", "pair", "user_mean", "none"]] * 20
    assert sorted(opened) == sorted(paths)
