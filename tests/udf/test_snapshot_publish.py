"""Publishing and going back, killed at each step, repeated, and at once."""

import contextlib
import threading
from datetime import UTC, datetime, timedelta

import pytest

from jobs.common import snapshots
from jobs.common.errors import UserError
from solaris_udf.snapshot import SnapshotError
from solaris_udf.snapshot.layout import MANIFEST
from solaris_udf.snapshot.publish import publish, read_current
from solaris_udf.snapshot.storage import LocalStorage
from tests.udf.snapshot_fakes import LATER, NEW, OLD, answer, flip, publish_snapshot, write_snapshot


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
