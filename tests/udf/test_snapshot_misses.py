import threading
from datetime import UTC, datetime

import numpy as np
import pyarrow.dataset as ds
import pytest

from solaris_udf.snapshot import MissLog, Snapshot, SnapshotError, SnapshotFollower
from tests.udf.snapshot_fakes import HIGH, HOUR, LOW, own, publish_snapshot

NIGHT = 1_767_398_400_000_000  # 2026-01-03T00:00Z
PAIRS = {(1, 10): ([1.0, 2.0], NIGHT - HOUR)}
USERS = {1: own([3.0, 4.0], NIGHT - HOUR)}


def written(folder):
    return ds.dataset(folder, partitioning="hive").to_table().to_pylist() if folder.exists() else []


def test_what_no_pair_answered_is_written_by_day_with_its_tier(tmp_path):
    publish_snapshot(tmp_path / "snapshots", PAIRS, USERS)
    log = MissLog(tmp_path / "misses", share=1)
    snapshot = Snapshot.open(tmp_path / "snapshots", engine="numpy", misses=log)
    # The pair itself; its user's mean; nothing at all, at the last instant of the day before.
    snapshot.lookup([1, 1, LOW], [10, 11, HIGH], np.array([NIGHT, NIGHT + 1, NIGHT - 1]))
    assert written(tmp_path / "misses") == []  # a lookup touches no disk
    assert log.flush() == 2
    assert log.flush() == 0
    rows = sorted(written(tmp_path / "misses"), key=lambda row: row["user_id"])
    assert [(row["user_id"], row["item_id"], row["tier"], row["weight"], row["day"]) for row in rows] == [
        (LOW, HIGH, 0, 1.0, "2026-01-02"),
        (1, 11, 2, 1.0, "2026-01-03"),
    ]
    assert rows[0]["missed_at"] == datetime(2026, 1, 2, 23, 59, 59, 999999, UTC)
    assert not list((tmp_path / "misses").rglob(".*"))


def test_a_sample_weighs_what_it_stands_for_and_memory_is_bounded(tmp_path):
    publish_snapshot(tmp_path / "snapshots", PAIRS)
    log = MissLog(tmp_path / "sampled", share=0.1)
    Snapshot.open(tmp_path / "snapshots", engine="numpy", misses=log).lookup(np.full(100_000, 5), np.arange(100_000))
    assert 9_500 < log.flush() < 10_500  # five standard deviations of the draw
    assert {row["weight"] for row in written(tmp_path / "sampled")} == {10.0}
    assert log.dropped == 0

    small = MissLog(tmp_path / "small", share=1, capacity=30)
    snapshot = Snapshot.open(tmp_path / "snapshots", engine="numpy", misses=small)
    for _ in range(4):
        snapshot.lookup(np.full(20, 5), np.arange(20))
    assert (small.flush(), small.dropped) == (30, 50)
    snapshot.lookup([5], [1])
    assert small.flush() == 1


def test_threads_lose_and_double_nothing(tmp_path):
    publish_snapshot(tmp_path / "snapshots", PAIRS)
    log = MissLog(tmp_path / "misses", share=1)
    snapshot = Snapshot.open(tmp_path / "snapshots", engine="numpy", misses=log)

    def ask(user):
        for item in range(50):
            snapshot.lookup([user], [item], NIGHT)
            if item % 10 == 0:
                log.flush()

    threads = [threading.Thread(target=ask, args=(user,)) for user in range(100, 108)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    found = sorted((row["user_id"], row["item_id"]) for row in written(tmp_path / "misses"))
    assert found == [(user, item) for user in range(100, 108) for item in range(50)]


def test_a_follower_writes_at_the_latest_when_it_closes_and_survives_a_refusing_disk(tmp_path):
    publish_snapshot(tmp_path / "snapshots", PAIRS)
    log = MissLog(tmp_path / "misses", share=1)
    with SnapshotFollower(tmp_path / "snapshots", poll_seconds=60, engine="numpy", misses=log) as follower:
        follower.lookup([2], [2], NIGHT)
    assert len(written(tmp_path / "misses")) == 1

    (tmp_path / "file").write_text("not a folder")
    refused = MissLog(tmp_path / "file", share=1)
    with SnapshotFollower(tmp_path / "snapshots", poll_seconds=60, engine="numpy", misses=refused) as follower:
        follower.lookup([2], [2], NIGHT)
    assert refused.dropped == 1


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.1}, {"capacity": 0}])
def test_wrong_settings_are_refused(tmp_path, wrong):
    with pytest.raises(SnapshotError, match=next(iter(wrong))):
        MissLog(tmp_path, **wrong)
