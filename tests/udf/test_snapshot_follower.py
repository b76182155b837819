"""Following CURRENT: swaps, leases, and what happens when the new snapshot is bad."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs.common import snapshots
from solaris_udf.snapshot import SnapshotError, SnapshotFollower, opening
from solaris_udf.tiers import PAIR
from tests.udf.snapshot_fakes import LATER, NEW, OLD, flip, own, publish_snapshot


def test_the_follower_swaps_and_outlives_bad_snapshots(tmp_path):
    first = publish_snapshot(tmp_path, OLD)
    with SnapshotFollower(tmp_path, poll_seconds=3600) as follower:
        assert follower.lookup([1], [1], 0).embedding.tolist() == [[1, 1]]
        assert follower.poll() is False
        second = publish_snapshot(tmp_path, NEW, **LATER)
        flip(next((tmp_path / second).rglob("pairs.arrow")), 400)
        assert follower.poll() is False
        assert "sha256" in (follower.error or "")
        assert (follower.snapshot.snapshot_id, follower.lookup([1], [1], 0).embedding.tolist()) == (first, [[1, 1]])
        flip(next((tmp_path / second).rglob("pairs.arrow")), 400)
        held = follower.snapshot
        assert follower.poll() is True
        assert (follower.error, follower.swaps) == (None, 1)
        assert follower.lookup([1], [1], 0).embedding.tolist() == [[5, 5]]
        assert held.lookup([1], [1], 0).embedding.tolist() == [[1, 1]]
        (tmp_path / "CURRENT").write_text("")
        assert follower.poll() is False
        assert "is empty" in (follower.error or "")
        assert follower.counters.read()["pair"] == 4
    assert follower.lookup([1], [1], 0).embedding.tolist() == [[5, 5]]
    with pytest.raises(SnapshotError):
        SnapshotFollower(tmp_path / "none")


def test_hashes_are_checked_unless_the_caller_says_otherwise(tmp_path):
    first = publish_snapshot(tmp_path, OLD)
    flip(next((tmp_path / first).rglob("pairs.arrow")), 400)
    with pytest.raises(SnapshotError, match="sha256"):
        SnapshotFollower(tmp_path)
    with SnapshotFollower(tmp_path, poll_seconds=3600, verify="manifest") as follower:
        assert follower.snapshot.snapshot_id == first


def test_a_snapshot_that_stays_damaged_is_hashed_ever_more_rarely_until_a_good_one_serves(tmp_path):
    publish_snapshot(tmp_path, OLD)
    with SnapshotFollower(tmp_path, poll_seconds=20) as follower, SnapshotFollower(tmp_path, 3600) as rare:
        damaged = next((tmp_path / publish_snapshot(tmp_path, NEW, **LATER)).rglob("pairs.arrow"))
        flip(damaged, 400)
        waits = []
        for _ in range(40):
            waits.append(follower.wait_seconds())
            follower.poll()
        assert waits[:4] == [20, 40, 60, 60] and set(waits[4:]) == {60}
        assert not rare.poll() and rare.wait_seconds() == 3600
        flip(damaged, 400)
        assert follower.poll() and follower.wait_seconds() == 20


def test_lookups_go_on_while_a_new_snapshot_is_checked(tmp_path, monkeypatch):
    publish_snapshot(tmp_path, OLD)
    with SnapshotFollower(tmp_path, poll_seconds=0.01) as follower:
        checking, go = threading.Event(), threading.Event()
        digest = opening.sha256_of

        def waits(path):
            checking.set()
            assert go.wait(60)
            return digest(path)

        monkeypatch.setattr(opening, "sha256_of", waits)
        publish_snapshot(tmp_path, NEW, **LATER)
        assert checking.wait(60)
        assert follower.lookup([1], [1], 0).embedding.tolist() == [[1, 1]] and follower.swaps == 0
        go.set()
        deadline = time.monotonic() + 60
        while not follower.swaps and time.monotonic() < deadline:
            time.sleep(0.01)
        assert follower.lookup([1], [1], 0).embedding.tolist() == [[5, 5]]


def test_no_lookup_fails_while_versions_roll(tmp_path):
    publish_snapshot(tmp_path, OLD)
    stop, faults, seen = threading.Event(), [], set()
    with SnapshotFollower(tmp_path, poll_seconds=0.002) as follower:

        def read():
            while not stop.is_set():
                try:
                    found = follower.lookup([1, 1], [1, 1], 0)
                    seen.add(found.embedding[0, 0])
                    assert found.tier.tolist() == [1, 1]
                    assert found.embedding[0].tolist() == found.embedding[1].tolist()
                except Exception as error:
                    faults.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for version in range(12):
            publish_snapshot(
                tmp_path,
                {(1, 1): ((float(version), 0.0), 0)},
                slice_name=f"20260104T{version:02d}0000Z",
                as_of=version + 1,
            )
            snapshots.gc(tmp_path, keep=2, dry_run=False)
            deadline = time.monotonic() + 10
            while version not in seen and time.monotonic() < deadline:
                time.sleep(0.002)
        stop.set()
        reader.join()
    assert not faults
    assert set(range(12)) <= seen
    assert len(snapshots.list_all(tmp_path)) == 2


def test_a_follower_holds_a_lease_on_what_it_serves_and_gc_leaves_that_alone(tmp_path):
    def publish_day(day):
        rows = {(1, 1): ((float(day), 0.0), day)}
        return publish_snapshot(tmp_path, rows, slice_name=f"2026010{day}T000000Z", as_of=day)

    def leases():
        return [path.name for path in (tmp_path / ".leases").iterdir()]

    first = publish_day(1)
    with SnapshotFollower(tmp_path, poll_seconds=3600) as follower, SnapshotFollower(tmp_path, 3600) as other:
        assert len(leases()) == 2 and all(name.startswith(f"{first}.") for name in leases())
        second, third = publish_day(2), publish_day(3)
        assert other.poll() and follower.snapshot.snapshot_id == first
        assert sorted(name.split(".")[0] for name in leases()) == [first, third]
        dead = tmp_path / ".leases" / f"{second}.killed"
        dead.touch()
        os.utime(dead, (time.time() - 86400 * 2,) * 2)
        assert snapshots.gc(tmp_path, keep=1, dry_run=False).snapshots == [second]
        assert not dead.exists() and len(leases()) == 2
        assert follower.poll() and [name.split(".")[0] for name in leases()] == [third, third]
    assert leases() == []


def test_a_folder_that_takes_no_lease_is_followed_all_the_same(tmp_path):
    publish_snapshot(tmp_path, {(1, 1): ((1.0, 0.0), 1)}, slice_name="20260101T000000Z", as_of=1)
    (tmp_path / ".leases").write_text("no folder")
    with SnapshotFollower(tmp_path, poll_seconds=3600) as follower:
        assert follower.lookup([1], [1], at=2).tier[0] == PAIR


def test_the_example_ranker_runs_on_a_snapshots_folder(tmp_path):
    publish_snapshot(tmp_path, {(1, item): ((1.0, float(item)), 0) for item in range(4)}, {1: own((1.0, 2.0), 0)})
    script = Path(__file__).parents[2] / "examples" / "online_ranker.py"
    command = [sys.executable, str(script), str(tmp_path), "--requests", "2", "--at", "1970-01-01T00:00:00+00:00"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "answered by tier: {'pair': 30}" in shown
    broken = subprocess.run([*command[:2], str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (broken.returncode, broken.stderr.count("\n")) == (1, 1)
