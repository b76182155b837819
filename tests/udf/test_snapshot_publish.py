import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.common import snapshots
from jobs.common.errors import UserError
from solaris_udf.codec import decode
from solaris_udf.snapshot import Snapshot, SnapshotError, SnapshotFollower, opening, reader
from solaris_udf.snapshot.layout import MANIFEST
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.publish import publish, read_current
from solaris_udf.snapshot.shards import write_shards
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.validate import Limits, Totals, check_against_previous, check_content, previous_manifest
from solaris_udf.tiers import PAIR
from tests.udf.snapshot_fakes import HOUR, batch_of, cold, own, pair_hash, publish_snapshot, user_hash, write_snapshot

OLD = {(1, 1): ((1.0, 1.0), 0), (2, 2): ((2.0, 2.0), 0)}
NEW = {(1, 1): ((5.0, 5.0), 0), (3, 3): ((3.0, 3.0), 0)}
LATER = {"slice_name": "20260103T060000Z", "as_of": 6 * HOUR}


class Killed(BaseException):
    """Stands for the process dying."""


class FailingStorage(LocalStorage):
    """Dies before its n-th change of the disk (or right after it, if late)."""

    def __init__(self, root, step, late):
        super().__init__(root)
        self.left, self.late = step, late

    def _change(self, name, *arguments):
        self.left -= 1
        now = self.left == 0
        if now and not self.late:
            raise Killed
        getattr(LocalStorage, name)(self, *arguments)
        if now:
            raise Killed

    def write_text(self, *arguments):
        self._change("write_text", *arguments)

    def rename_folder(self, *arguments):
        self._change("rename_folder", *arguments)

    def remove_folder(self, *arguments):
        self._change("remove_folder", *arguments)

    def replace_text(self, *arguments):
        self._change("replace_text", *arguments)


def answer(root, user=1, item=1):
    return Snapshot.open(root, verify="full").lookup([user], [item], 0).embedding[0].tolist()


@pytest.mark.parametrize("late", [False, True])
def test_killed_at_any_step_readers_see_the_old_snapshot_or_the_new_whole(tmp_path, late):
    for step in range(1, 10):
        root = tmp_path / str(step)
        old = publish_snapshot(root, OLD)
        manifest = write_snapshot(root, NEW, **LATER)
        try:
            publish(FailingStorage(root, step, late), ".staging-test", manifest)
        except Killed:
            assert answer(root) in ([1, 1], [5, 5])
            assert read_current(LocalStorage(root)) in (old, manifest.snapshot_id)
            # Whoever comes next can publish.
            publish_snapshot(root, NEW, **LATER)
            assert answer(root) == [5, 5]
        else:
            assert answer(root) == [5, 5]
            break
    assert step > 4


def test_the_same_content_again_is_a_no_op_and_an_older_slice_never_takes_current(tmp_path):
    first = publish_snapshot(tmp_path, OLD)
    stamp = (tmp_path / first / MANIFEST).stat().st_mtime_ns
    assert publish_snapshot(tmp_path, OLD) == first
    assert (tmp_path / first / MANIFEST).stat().st_mtime_ns == stamp
    second = publish_snapshot(tmp_path, NEW, **LATER)
    assert first != second
    older = write_snapshot(tmp_path, {(9, 9): ((9.0, 9.0), 0)})
    assert publish(LocalStorage(tmp_path), ".staging-test", older) is False
    assert (read_current(LocalStorage(tmp_path)), answer(tmp_path)) == (second, [5, 5])
    assert [info.snapshot_id for info in snapshots.list_all(tmp_path)] == sorted([first, older.snapshot_id, second])
    # The same slice with other content does go live.
    assert publish_snapshot(tmp_path, {(1, 1): ((6.0, 6.0), 0)}, **LATER) != second
    assert answer(tmp_path) == [6, 6]


def test_a_damaged_folder_of_the_same_id_is_replaced(tmp_path):
    name = publish_snapshot(tmp_path, OLD)
    victim = next((tmp_path / name).rglob("pairs.arrow"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert publish_snapshot(tmp_path, OLD) == name
    assert answer(tmp_path) == [1, 1]


def test_two_publishers_at_once_both_end_with_one_snapshot(tmp_path):
    manifests = [write_snapshot(tmp_path, NEW, staging=f".staging-{name}") for name in "ab"]
    threads = [
        threading.Thread(target=publish, args=(LocalStorage(tmp_path), f".staging-{name}", manifest))
        for name, manifest in zip("ab", manifests, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.snapshot_id for info in snapshots.list_all(tmp_path)] == [manifests[0].snapshot_id]
    assert answer(tmp_path) == [5, 5]


def test_a_held_lock_is_a_clear_error(tmp_path):
    with (
        LocalStorage(tmp_path).lock(),
        pytest.raises(SnapshotError, match=r"another process holds .*publish\.lock"),
        LocalStorage(tmp_path).lock(wait_seconds=0.1),
    ):
        pass


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit(folder: Path, **changes) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first_file(folder: Path, **changes) -> list:
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return [{**files[0], **changes}, *files[1:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root, folder: (root / "CURRENT").write_text(""), "CURRENT is empty"),
        (lambda root, folder: (root / "CURRENT").write_text("../x\n"), "does not hold a snapshot id"),
        (lambda root, folder: (root / "CURRENT").write_text("20200101T000000Z-m-x\n"), "can't be opened"),
        (lambda root, folder: (root / "CURRENT").unlink(), "no snapshot was published"),
        (lambda root, folder: (folder / MANIFEST).write_text("{"), "not valid JSON"),
        (lambda root, folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), "can't be read|not valid JSON"),
        (lambda root, folder: (folder / MANIFEST).write_text("[]"), "not a snapshot manifest"),
        (lambda root, folder: edit(folder, format_version="2.0"), "format version 2.0; this reader knows 1.x: upgrade"),
        (lambda root, folder: edit(folder, format_version="x"), "not MAJOR.MINOR"),
        (lambda root, folder: edit(folder, dim=3), "changed after it was written"),
        (lambda root, folder: edit(folder, dim="2"), "dim is '2', must be an integer"),
        (lambda root, folder: edit(folder, shards=3), "no part of a snapshot: 'shard-00000-of-00002"),
        (lambda root, folder: edit(folder, files=first_file(folder, path="../../etc/passwd")), "snapshot: '../../etc"),
        (lambda root, folder: edit(folder, files=first_file(folder, path="/etc/passwd")), "no part of a snapshot"),
        (lambda root, folder: edit(folder, files=first_file(folder)[1:]), "does not list"),
        (lambda root, folder: (folder / "shard-00000-of-00002/pairs.arrow").unlink(), "is missing"),
        (lambda root, folder: (folder / "shard-00001-of-00002/users.arrow").write_bytes(b"ARROW1"), "has 6 bytes"),
        (lambda root, folder: flip(folder / "shard-00000-of-00002/pairs.arrow", 400), "sha256 is not the manifest's"),
        (lambda root, folder: flip(folder / "shard-00001-of-00002/pairs.buckets.arrow", 200), "sha256 is not"),
    ],
)
def test_whatever_is_damaged_gives_one_clear_line(tmp_path, damage, message):
    name = publish_snapshot(tmp_path, OLD, {1: own((1.0, 2.0), 0)})
    damage(tmp_path, tmp_path / name)
    with pytest.raises(SnapshotError, match=message) as error:
        Snapshot.open(tmp_path, verify="full")
    assert "\n" not in str(error.value)
    assert snapshots.verify(tmp_path) == [str(error.value)]


def test_unverified_damage_is_an_error_or_a_miss_and_never_a_crash(tmp_path):
    name = publish_snapshot(tmp_path, {(user, 1): ((1.0, 2.0), 0) for user in range(50)}, shards=1)
    data, offsets = (tmp_path / name / "shard-00000-of-00001" / file for file in ("pairs.arrow", "pairs.buckets.arrow"))
    whole = {path: path.read_bytes() for path in (data, offsets)}
    for path, content in whole.items():
        for place in range(0, len(content), 7):
            path.write_bytes(content)
            flip(path, place)
            with contextlib.suppress(SnapshotError):
                Snapshot.open(tmp_path, verify="none").lookup(list(range(60)), [1] * 60, 0)
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(SnapshotError):
            Snapshot.open(tmp_path, verify="none")
        path.write_bytes(content)


def test_files_of_another_width_than_the_manifest_says(tmp_path):
    name = publish_snapshot(tmp_path / "a", OLD)
    publish_snapshot(tmp_path / "b", dict.fromkeys(OLD, ((1.0, 2.0, 3.0), 0)), dim=3)
    wide = next((tmp_path / "b").rglob("shard-00000-of-00002/pairs.arrow"))
    (tmp_path / "a" / name / "shard-00000-of-00002/pairs.arrow").write_bytes(wide.read_bytes())
    with pytest.raises(SnapshotError, match="other columns"):
        Snapshot.open(tmp_path / "a", verify="none")


def test_a_later_minor_version_can_be_read(tmp_path):
    name = publish_snapshot(tmp_path, OLD)
    edit(tmp_path / name, format_version="1.7", novelty=1)
    assert Manifest.parse((tmp_path / name / MANIFEST).read_text(), "m").minor == 7


def test_open_by_folder_by_pin_and_by_a_copy(tmp_path):
    first = publish_snapshot(tmp_path, OLD)
    publish_snapshot(tmp_path, NEW, **LATER)
    assert Snapshot.open(tmp_path, pin=first).snapshot_id == first
    assert Snapshot.open(tmp_path / first).snapshot_id == first
    (tmp_path / first).rename(tmp_path / "copy")
    assert Snapshot.open(tmp_path / "copy").snapshot_id == first
    for bad in ("nothing", "../x"):
        with pytest.raises(SnapshotError):
            Snapshot.open(tmp_path, pin=bad)
    with pytest.raises(SnapshotError, match="there is no folder"):
        Snapshot.open(tmp_path / "missing")


def test_a_live_snapshot_that_is_removed_while_it_is_opened_is_no_error(tmp_path, monkeypatch):
    first = publish_snapshot(tmp_path, OLD)
    find = reader.find_snapshot

    def slow_find(path, pin):
        found = find(path, pin)
        if found[1].snapshot_id == first:
            publish_snapshot(tmp_path, NEW, **LATER)
            snapshots.gc(tmp_path, keep=1, dry_run=False)
        return found

    monkeypatch.setattr(reader, "find_snapshot", slow_find)
    assert answer(tmp_path) == [5, 5]


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


def test_pin_rollback_diff_and_gc(tmp_path):
    names = [
        publish_snapshot(
            tmp_path,
            {(1, 1): ((float(day), 0.0), day), (day, 7): ((1.0, 1.0), 0)},
            slice_name=f"2026010{day}T000000Z",
            as_of=day,
        )
        for day in range(1, 6)
    ]
    assert snapshots.rollback(tmp_path) == names[3]
    assert snapshots.rollback(tmp_path, names[2]) == names[2]
    moments, moved = zip(*snapshots.rollbacks(tmp_path), strict=True)
    assert moved == (names[3], names[2])
    assert datetime.now(UTC) - timedelta(minutes=5) < moments[0] <= moments[1] <= datetime.now(UTC)
    assert snapshots.inspect(tmp_path)["snapshot_id"] == names[2]
    with pytest.raises(UserError, match="there is no snapshot 'x'"):
        snapshots.rollback(tmp_path, "x")
    found = snapshots.compare(tmp_path, names[0], names[1])
    assert found.pairs.__dict__ == {"added": 1, "removed": 1, "common": 1, "changed": 1, "recomputed": 1}
    snapshots.pin(tmp_path, names[0])
    assert (tmp_path / "PINNED").read_text() == names[0] + "\n"
    (tmp_path / ".staging-old").mkdir()  # too young to be abandoned
    planned = snapshots.gc(tmp_path, keep=1)
    assert planned == snapshots.gc(tmp_path, keep=1, dry_run=False)
    assert planned.snapshots == [names[1]]  # 0 is pinned, 2 is live, 3 and 4 come after it
    assert [info.snapshot_id for info in snapshots.list_all(tmp_path)] == [names[0], *names[2:]]
    snapshots.unpin(tmp_path, names[0])
    assert snapshots.gc(tmp_path, keep=1, protect=[names[0]]).snapshots == []
    with pytest.raises(UserError, match="not pinned"):
        snapshots.unpin(tmp_path, names[0])
    flip(next((tmp_path / names[4]).rglob("pairs.arrow")), 400)
    with pytest.raises(UserError, match="sha256"):
        snapshots.rollback(tmp_path, names[4])


def test_a_rollback_killed_at_any_step_is_made_true_by_the_same_command(tmp_path, monkeypatch):
    for late in (False, True):
        for step in range(1, 10):
            root = tmp_path / f"{step}-{late}"
            names = [
                publish_snapshot(root, {(1, 1): ((float(day), 0.0), 0)}, slice_name=f"2026010{day}T000000Z", as_of=day)
                for day in (1, 2, 3)
            ]
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                patch.setattr(snapshots, "LocalStorage", lambda at, of=(step, late): FailingStorage(at, *of))
                snapshots.rollback(root)
                break
            live, noted = read_current(LocalStorage(root)), [name for _, name in snapshots.rollbacks(root)]
            assert (live, noted) in ((names[2], []), (names[2], [names[1]]), (names[1], [names[1]]))
            assert snapshots.gc(root, keep=1).snapshots == ([names[0]] if live == names[1] else names[:2])
            if live == names[2]:
                assert snapshots.rollback(root) == names[1]
                assert answer(root) == [2, 0] and snapshots.rollbacks(root)[-1][1] == names[1]
        assert step > 3


def test_the_checks_before_publishing(tmp_path):
    usual = Limits(0.5, 0.5, 0.5)
    users = {1: own((1.0, 1.0), 0)}
    before = write_snapshot(tmp_path, {(1, item): ((1.0, 0.0), 0) for item in range(10)}, users, staging=".a")
    half = write_snapshot(tmp_path, {(1, item): ((1.0, 0.0), 0) for item in range(5)}, users, staging=".b", **LATER)
    less = write_snapshot(tmp_path, {(1, item): ((1.0, 0.0), 0) for item in range(4)}, users, staging=".c", **LATER)
    large = write_snapshot(tmp_path, {(1, item): ((1.6, 0.0), 0) for item in range(10)}, users, staging=".d", **LATER)
    empty = write_snapshot(tmp_path, {}, users, staging=".e", version="m2", **LATER)
    check_content(before, Totals(10, 1))
    for totals in (Totals(11, 1), Totals(10, 2)):
        with pytest.raises(SnapshotError):
            check_content(before, totals)
    check_against_previous(half, before, usual)
    check_against_previous(empty, None, usual)
    for bad, message in ((less, "4 pairs after 10"), (large, "mean norm"), (empty, "no fresh pair")):
        with pytest.raises(SnapshotError, match=message):
            check_against_previous(bad, before, usual)
    # Users who get a group's centroid are counted apart: they neither stand in for lost means nor are missed.
    many = {1: own((1.0, 1.0), 0), 2: own((1.0, 1.0), 0), 3: own((1.0, 1.0), 0)}
    means = write_snapshot(tmp_path, {(1, 1): ((1.0, 0.0), 0)}, many, staging=".f")
    lost = {user: cold((1.0, 1.0), 0) for user in (2, 3)} | {1: many[1]}
    centroids = write_snapshot(tmp_path, {(1, 1): ((1.0, 0.0), 0)}, lost, staging=".g", **LATER)
    assert (centroids.users, centroids.users_own, centroids.users_cold) == (3, 1, 2)
    assert (means.minor, centroids.minor) == (0, 1)  # an older reader of 1.0 takes a 1.1 as it is
    assert Manifest.parse(centroids.to_json(), "m") == centroids
    with pytest.raises(SnapshotError, match="1 users after 3"):
        check_against_previous(centroids, means, usual)
    check_against_previous(write_snapshot(tmp_path, {(1, 1): ((1.0, 0.0), 0)}, users, staging=".h"), centroids, usual)
    with pytest.raises(SnapshotError, match="1 users' own means"):
        check_content(centroids, Totals(1, 3))


def test_the_snapshot_to_compare_with_is_the_one_of_the_time_before(tmp_path):
    storage = LocalStorage(tmp_path)
    assert previous_manifest(storage, 10) is None
    days = [
        publish_snapshot(tmp_path, {(1, 1): ((float(day), 0.0), 0)}, slice_name=f"2026010{day}T000000Z", as_of=day)
        for day in (1, 2, 3)
    ]
    again = publish_snapshot(tmp_path, {(1, 1): ((9.0, 0.0), 0)}, slice_name="20260103T000000Z", as_of=3)
    for before, expected in ((1, None), (2, days[0]), (3, days[1]), (4, again)):
        found = previous_manifest(storage, before)
        assert (found and found.snapshot_id) == expected


def test_rows_out_of_order_or_of_another_shard_and_repeated_users_are_refused(tmp_path):
    good = batch_of({(user, 1): ((1.0, 2.0), 0) for user in range(6)}, {}, 1, 2)
    users = batch_of({}, {user: own((1.0, 2.0), 0) for user in range(3)}, 1, 2)
    for rows, shards in ((good.take([1, 0]), 1), (users.take([1, 1]), 1), (good, 3)):
        with pytest.raises(ValueError, match=r"order|another shard"):
            list(write_shards(iter([rows]), folder=str(tmp_path), shards=shards, codec="float16", dim=2, neighbors=1))
        assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("split", [1, 2, 3, 100])
def test_of_a_pair_that_comes_several_times_the_first_row_counts(tmp_path, split):
    newest, older = ({(user, 1): ((x, 2.0), at) for user in range(3)} for x, at in ((9.0, 7), (1.0, 3)))
    both = pa.Table.from_batches([batch_of(newest, {}, 1, 2), batch_of(older, {}, 1, 2)]).to_batches()
    rows = pa.Table.from_batches(both).take([0, 3, 1, 4, 2, 5]).combine_chunks().to_batches(max_chunksize=split)
    out = list(write_shards(iter(rows), folder=str(tmp_path), shards=1, codec="float16", dim=2, neighbors=1))
    assert json.loads(out[0].column("summary")[0].as_py())["pairs"] == 3
    with pa.ipc.open_file(next(tmp_path.rglob("pairs.arrow"))) as file:
        written = file.read_all()
    assert written.column("computed_at").to_pylist() == [7, 7, 7]
    assert decode(written.column("embedding").combine_chunks().cast(pa.binary())).tolist() == [[9.0, 2.0]] * 3


def test_refused_vectors_are_counted_by_reason(tmp_path):
    batch = batch_of({(user, 1): ((1.0, 2.0), 0) for user in range(3)}, {}, 1, 2)
    out = next(write_shards(iter([batch]), folder=str(tmp_path), shards=1, codec="float16", dim=3, neighbors=1))
    assert json.loads(out.column("summary")[0].as_py())["faults"] == {"not of 3 dimensions": 3}


def test_the_example_ranker_runs_on_a_snapshots_folder(tmp_path):
    publish_snapshot(tmp_path, {(1, item): ((1.0, float(item)), 0) for item in range(4)}, {1: own((1.0, 2.0), 0)})
    script = Path(__file__).parents[2] / "examples" / "online_ranker.py"
    command = [sys.executable, str(script), str(tmp_path), "--requests", "2", "--at", "1970-01-01T00:00:00+00:00"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "answered by tier: {'pair': 30}" in shown
    broken = subprocess.run([*command[:2], str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (broken.returncode, broken.stderr.count("\n")) == (1, 1)


def test_the_reader_imports_numpy_and_pyarrow_only():
    code = (
        "import sys, solaris_udf.snapshot; print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'pandas', 'pydantic', 'pyspark', 'torch', 'faiss', 'numba', 'jobs'}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_the_check_values_of_the_format_page_are_right():
    page = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text()
    for value in (user_hash(0), user_hash(-1), pair_hash(1, 2)):
        assert f"0x{value:016x}" in page


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
