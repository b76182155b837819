"""Publishing and reading while processes die, disks fill up and versions roll. Processes are forked from one script, so
that each costs no imports."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.common import snapshots
from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.publish import list_snapshots, publish, read_current, reuse_files
from solaris_udf.snapshot.storage import LocalStorage
from tests.udf.snapshot_fakes import LATER, NEW, OLD, own, publish_snapshot, write_snapshot

PROJECT = Path(__file__).parents[2]
COMMON = """
import os, resource, signal, sys, time
from pathlib import Path
import pandas, pyarrow.compute  # a writer's first array imports them: once here, not in every child
from solaris_udf.snapshot import Snapshot, SnapshotFollower
from tests.udf.snapshot_fakes import HOUR, LATER, NEW, own, publish_snapshot

def fork(work):
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

root = Path(sys.argv[1])
"""


def run(script: str, root: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", COMMON + script, str(root), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT)


def first_vector(snapshot: Snapshot) -> list[float]:
    return snapshot.lookup([1], [1], 0).embedding[0].tolist()


KILLED_AT_EACH_STEP = """
def dies_at(step):
    left = [step]
    def counted(function):
        def call(*arguments, **more):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)
        return call
    # Everything of which a reader, or the next publisher, could see a half.
    os.fsync, os.mkdir, os.unlink = counted(os.fsync), counted(os.mkdir), counted(os.unlink)
    Path.replace, Path.rename = counted(Path.replace), counted(Path.rename)

def export(step):
    dies_at(step)
    publish_snapshot(root, {(1, 1): ((float(step), 0.0), 0)}, slice_name=f"20260104T000{step:03d}Z", as_of=step,
                     staging=f".staging-{step}")

def live():
    snapshot = Snapshot.open(root, verify="full", engine="numpy")
    return snapshot.lookup([1], [1], 0).embedding[0, 0]

for step in range(1, 200):
    end = end_of(fork(lambda: export(step)))
    print(end, int(live()))
    if end == 0:
        break
"""


def test_kill_9_at_every_step_of_an_export_leaves_a_whole_snapshot_live(tmp_path):
    publish_snapshot(tmp_path, {(1, 1): ((0.0, 0.0), 0)})
    reader = Snapshot.open(tmp_path, verify="full", engine="numpy")
    lines = [line.split() for line in run(KILLED_AT_EACH_STEP, tmp_path).stdout.splitlines()]
    ends, live = [int(end) for end, _ in lines], [int(value) for _, value in lines]
    assert ends == [-9] * (len(ends) - 1) + [0]
    assert len(ends) > 30  # 8 files written, flushed and moved, the manifest, the rename, the flip
    # The old one, until the kill comes after the flip; never a part of one, and the next publisher always can.
    flipped = next(step for step, value in enumerate(live, 1) if value)
    assert live == [0] * (flipped - 1) + list(range(flipped, len(live) + 1))
    assert flipped > len(live) - 5
    assert first_vector(reader) == [0, 0]


def test_processes_that_publish_at_once_leave_the_latest_slice_live_and_all_whole(tmp_path):
    script = """
def export(hour):
    slice_name = f"20260104T{hour:02d}0000Z"
    publish_snapshot(root, {(1, 1): ((float(hour), 0.0), 0)}, slice_name=slice_name, as_of=hour * HOUR,
                     staging=f".staging-{hour}-{os.getpid()}")

children = [fork(lambda: export(hour)) for hour in (1, 2, 3, 3, 2, 1)]
print(*map(end_of, children))
"""
    assert run(script, tmp_path).stdout.split() == ["0"] * 6
    storage = LocalStorage(tmp_path)
    names = list_snapshots(storage)
    assert [name[:11] for name in names] == ["20260104T01", "20260104T02", "20260104T03"]
    assert read_current(storage) == names[2]
    for hour, name in enumerate(names, 1):
        assert first_vector(Snapshot.open(tmp_path, pin=name, verify="full", engine="numpy")) == [hour, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".publish.lock", *names, "CURRENT"]


def test_a_file_size_limit_stops_an_export_and_not_the_readers(tmp_path):
    old = publish_snapshot(tmp_path, OLD)
    script = """
def export():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    publish_snapshot(root, {(user, 1): ((1.0, 2.0), 0) for user in range(5000)}, **LATER)

print(end_of(fork(export)))
"""
    done = run(script, tmp_path)
    assert (done.stdout, "File too large" in done.stderr) == ("1\n", True)
    live = Snapshot.open(tmp_path, verify="full", engine="numpy")
    assert (live.snapshot_id, first_vector(live)) == (old, [1, 1])


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small tmpfs can't be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_stops_an_export_and_not_the_readers(small_disk):
    old = publish_snapshot(small_disk, OLD)
    with pytest.raises(OSError, match="No space left"):
        publish_snapshot(small_disk, {(user, 1): ((1.0, 2.0), 0) for user in range(20_000)}, **LATER)
    shutil.rmtree(small_disk / ".staging-test")
    live = Snapshot.open(small_disk, verify="full", engine="numpy")
    assert (live.snapshot_id, first_vector(live)) == (old, [1, 1])
    publish_snapshot(small_disk, NEW, **LATER)
    assert first_vector(Snapshot.open(small_disk, verify="full", engine="numpy")) == [5, 5]


def test_sixteen_reader_processes_while_versions_roll_and_old_ones_go(tmp_path):
    script = """
def publish(version):
    pairs = {(user, 1): ((float(version), float(user)), 0) for user in range(50)}
    slice_name = f"20260104T00{version:02d}00Z"
    publish_snapshot(root, pairs, {1: own((float(version), 0.0), 0)}, slice_name=slice_name, as_of=version + 1)

def read():
    versions = set()
    with SnapshotFollower(root, poll_seconds=0.01, engine="numpy") as follower:
        while not (root / "stop").exists() or max(versions) < 11:
            found = follower.lookup(range(50), [1] * 50, 0)
            assert (found.tier == 1).all() and len(set(found.embedding[:, 0].tolist())) == 1
            assert found.embedding[:, 1].tolist() == list(range(50))
            assert not versions or found.embedding[0, 0] >= max(versions)
            versions.add(found.embedding[0, 0])
            time.sleep(0.002)

publish(0)
children = [fork(read) for _ in range(16)]
from jobs.common import snapshots
for version in range(1, 12):
    publish(version)
    snapshots.gc(root, keep=1, dry_run=False)
    time.sleep(0.05)
(root / "stop").touch()
print(*map(end_of, children))
"""
    done = run(script, tmp_path)
    assert (done.stdout.split(), done.stderr) == (["0"] * 16, "")
    snapshots.gc(tmp_path, keep=1, dry_run=False)  # no reader is left, and no lease of one
    assert len(snapshots.list_all(tmp_path)) == 1 and not list((tmp_path / ".leases").iterdir())


def test_shards_that_did_not_change_share_their_files_unless_they_are_damaged(tmp_path):
    storage = LocalStorage(tmp_path)
    many = {(user, 1): ((float(user), 0.0), 0) for user in range(20)}
    users = {1: own((1.0, 2.0), 0)}
    first = write_snapshot(tmp_path, many, users)
    publish(storage, ".staging-test", first)
    changed = write_snapshot(tmp_path, {**many, (1, 1): ((9.0, 9.0), 0)}, users, **LATER)
    same = {file.path for file in first.files} & {
        file.path for file, before in zip(changed.files, first.files, strict=True) if file == before
    }
    victim = next(path for path in sorted(same) if path.endswith("/pairs.arrow"))
    content = (tmp_path / first.snapshot_id / victim).read_bytes()
    (tmp_path / first.snapshot_id / victim).write_bytes(content[:400] + bytes([content[400] ^ 1]) + content[401:])
    shared = reuse_files(storage, ".staging-test", changed, first)
    publish(storage, ".staging-test", changed)
    assert len(same) == 7  # all but the pairs of the one shard
    linked = {path for path in same if (tmp_path / first.snapshot_id / path).stat().st_nlink == 2}
    assert linked == same - {victim}
    assert shared == sum(file.bytes for file in changed.files if file.path in linked)
    snapshots.gc(tmp_path, keep=1, dry_run=False)
    assert snapshots.list_all(tmp_path)[0].snapshot_id == changed.snapshot_id
    assert first_vector(Snapshot.open(tmp_path, verify="full", engine="numpy")) == [9, 9]
    assert not list(tmp_path.rglob("*.link"))
