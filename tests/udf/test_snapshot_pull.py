"""Many processes of a host that pull at once: one fetches, the others use what it brought.

A store in a folder stands for the bucket; every file that is fetched from it adds a line to a log.
"""

import subprocess
import sys
from pathlib import Path

from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.manifest import Manifest
from tests.udf.snapshot_fakes import OLD, publish_snapshot
from tests.udf.test_snapshot_robustness import COMMON, PROJECT

SCRIPT = """
from solaris_udf.snapshot import pull as module
fetch = module.fs.copy_files

def logged(source, *arguments, **more):
    with open(root / "fetched", "a") as log:
        log.write(source.rpartition("store/")[2] + "\\n")
    while not (root / "go").exists():
        time.sleep(0.01)
    fetch(source, *arguments, **more)

module.fs.copy_files = logged
lock = module.LocalStorage.lock

def noted(storage, wait_seconds=30.0, name=".publish.lock"):
    if name == module.PULL_LOCK:
        (root / f"at-the-lock-{os.getpid()}").touch()
    return lock(storage, wait_seconds, name)

module.LocalStorage.lock = noted

def wait_for(count):
    while len(list(root.glob("at-the-lock-*"))) < count:
        time.sleep(0.01)

def pull():
    name = module.pull((root / "store").as_uri(), root / "host")
    assert Snapshot.open(root / "host", verify="full", engine="numpy").snapshot_id == name
"""


def run(script: str, root: Path) -> list[str]:
    """What the script prints, in words."""
    command = [sys.executable, "-c", COMMON + SCRIPT + script, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT).stdout.split()


def files(root: Path, name: str) -> list[str]:
    manifest = Manifest.parse((root / "store" / name / "manifest.json").read_text(), name)
    return sorted(f"{name}/{file.path}" for file in manifest.files)


def fetched(root: Path) -> list[str]:
    return sorted((root / "fetched").read_text().splitlines())


def test_of_eight_processes_one_fetches(tmp_path):
    name = publish_snapshot(tmp_path / "store", OLD)
    script = """
children = [fork(pull) for _ in range(8)]
wait_for(8)  # all of them are there before the first file is
(root / "go").touch()
print(*map(end_of, children))
"""
    assert run(script, tmp_path) == ["0"] * 8
    assert fetched(tmp_path) == files(tmp_path, name)
    assert sorted(path.name for path in (tmp_path / "host").iterdir() if path.is_dir()) == [name]


def test_a_killed_fetcher_blocks_nobody(tmp_path):
    name = publish_snapshot(tmp_path / "store", OLD)
    (tmp_path / "go").touch()
    script = """
def dies():
    signal.alarm(60)  # whatever becomes of this test
    def killed(*arguments, **more):
        (root / "fetching").touch()
        time.sleep(600)
    module.fs.copy_files = killed
    pull()

first = fork(dies)
while not (root / "fetching").exists():
    time.sleep(0.01)
others = [fork(pull) for _ in range(4)]
wait_for(5)
assert not (root / "fetched").exists(), "they did not wait"
os.kill(first, signal.SIGKILL)
print(*map(end_of, [first, *others]))
"""
    assert run(script, tmp_path) == ["-9", *["0"] * 4]
    assert fetched(tmp_path) == files(tmp_path, name)


def test_who_waited_takes_what_the_store_has_by_then(tmp_path):
    """The store moves on while the first one fetches: a process that waited must not move CURRENT back."""
    publish_snapshot(tmp_path / "store", OLD)
    script = """
first = fork(pull)
while not (root / "fetched").exists():
    time.sleep(0.01)
second = fork(pull)
wait_for(2)
publish_snapshot(root / "store", NEW, **LATER)
(root / "go").touch()
print(*map(end_of, [first, second]))
"""
    assert run(script, tmp_path) == ["0", "0"]
    new = (tmp_path / "store" / "CURRENT").read_text()
    assert (tmp_path / "host" / "CURRENT").read_text() == new
    assert Snapshot.open(tmp_path / "host", engine="numpy").lookup([1], [1], 0).embedding.tolist() == [[5, 5]]
    assert len(fetched(tmp_path)) == len(set(fetched(tmp_path)))
