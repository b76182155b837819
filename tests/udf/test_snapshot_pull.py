"""Many processes of a host that pull at once: one fetches, the others use what it brought.

A store in a folder stands for the bucket; every file that is fetched from it adds a line to a log.
"""

import subprocess
import sys
from pathlib import Path

from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.manifest import Manifest
from tests.udf.snapshot_fakes import HOUR, publish_snapshot
from tests.udf.test_snapshot_robustness import COMMON, PROJECT

OLD = {(1, 1): ((1.0, 1.0), 0), (2, 2): ((2.0, 2.0), 0)}
NEW = {(1, 1): ((5.0, 5.0), 0), (3, 3): ((3.0, 3.0), 0)}
LATER = {"slice_name": "20260103T060000Z", "as_of": 6 * HOUR}
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


def test_of_sixteen_processes_one_fetches(tmp_path):
    name = publish_snapshot(tmp_path / "store", OLD)
    script = """
children = [fork(pull) for _ in range(16)]
time.sleep(2)  # all of them are there before the first file is
(root / "go").touch()
print(*map(end_of, children))
"""
    assert run(script, tmp_path) == ["0"] * 16
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
time.sleep(0.5)
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
time.sleep(1)  # it waits by now
publish_snapshot(root / "store", NEW, **LATER)
(root / "go").touch()
print(*map(end_of, [first, second]))
"""
    assert run(script, tmp_path) == ["0", "0"]
    new = (tmp_path / "store" / "CURRENT").read_text()
    assert (tmp_path / "host" / "CURRENT").read_text() == new
    assert Snapshot.open(tmp_path / "host", engine="numpy").lookup([1], [1], 0).embedding.tolist() == [[5, 5]]
    assert len(fetched(tmp_path)) == len(set(fetched(tmp_path)))
