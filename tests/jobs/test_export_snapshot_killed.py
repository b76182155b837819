"""An export whose whole process tree is killed with SIGKILL: nothing half is live, and the same command then publishes
the very bytes of an export that nobody disturbed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.common import snapshots
from jobs.common.runs import execute
from jobs.common.session import PROJECT
from solaris_udf.snapshot import Snapshot
from tests.conftest import AS_OF, SESSION, hours
from tests.jobs.test_export_snapshot import mean, near, pair
from tests.processes import MARK, marked, until

pytestmark = pytest.mark.spark

# argv: a file to make when the moment has come, the moment, and the job's own arguments.
SCRIPT = """
import sys, time
from pathlib import Path
from jobs import export_snapshot
from jobs.common import main
from solaris_udf.snapshot import publish

here, moment = Path(sys.argv[1]), sys.argv[2]

def then_wait(function):
    def call(*arguments, **more):
        done = function(*arguments, **more)
        here.touch()
        time.sleep(600)
        return done
    return call

def amid_the_files(write):
    def some(batches, **more):
        for done in write(batches, **more):
            yield done
            here.touch()
            time.sleep(600)
    return some

if moment == "files":
    export_snapshot.write_shards = amid_the_files(export_snapshot.write_shards)
elif moment == "links":
    export_snapshot.reuse_files = then_wait(export_snapshot.reuse_files)
else:
    publish.read_manifest = then_wait(publish.read_manifest)
main.main("export_snapshot", sys.argv[3:])
"""


def files_of(folder: Path) -> dict[str, bytes]:
    """What a reader may see."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0][0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def killed(tmp_path, root):
    """killed(moment, settings): runs export_snapshot on root and kills all its processes at that moment."""

    def run(moment, settings):
        here = tmp_path / moment
        overrides = (f"--set={setting}" for setting in (*SESSION, f"storage.root={root}", *settings))
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(here), moment, "--as-of", AS_OF.isoformat(), *overrides],
            env={**os.environ, MARK: str(tmp_path), "PYTHONPATH": str(PROJECT)},
            cwd=tmp_path,
            stderr=(tmp_path / "log").open("wb"),
        )
        try:
            until(lambda: here.exists() or process.poll() is not None, "the export never came there", seconds=600)
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        finally:
            while left := marked(str(tmp_path)):
                for one in left:
                    one.kill()
            process.wait()

    return run


@pytest.mark.parametrize(
    ("moment", "before"), [("files", False), pytest.param("links", True, marks=pytest.mark.long), ("flip", True)]
)
def test_the_same_command_publishes_the_bytes_of_an_undisturbed_run(
    spark, fill, make_config, root, tmp_path, killed, moment, before
):
    """before: whether an earlier snapshot is live, of which all shards but one are the same."""
    settings = ("export_snapshot.shards=3",)
    users = range(1, 13)
    fill("pair_embeddings", [pair(user, 10, user, 1) for user in users], AS_OF - hours(6))
    fill("user_embeddings", [mean(user, AS_OF - hours(6), user, 2) for user in users], AS_OF - hours(6))
    fill("user_neighbors", [near(99, (2, 0.75))], AS_OF - hours(24))
    if before:
        execute("export_snapshot", spark, make_config(*settings), AS_OF - hours(6))
    fill("pair_embeddings", [pair(1, 11, 5, 5)], AS_OF)
    shutil.copytree(root, tmp_path / "calm")
    calm = execute("export_snapshot", spark, make_config(*settings, f"storage.root={tmp_path / 'calm'}"), AS_OF).report
    assert (calm.metrics["bytes_reused"] > 0) == before
    there = files_of(root / "snapshots")
    assert ("CURRENT" in there) == before

    killed(moment, settings)
    after = files_of(root / "snapshots")
    assert {name: after[name] for name in there} == there
    assert bool(after.keys() - there.keys()) == (moment == "flip")  # a whole snapshot, which is not live yet
    left = {path.name[:9] for path in (root / "snapshots").iterdir() if path.is_dir() and path.name[0] == "."}
    assert left == (set() if moment == "flip" else {".staging-"})
    if before:
        assert Snapshot.open(root / "snapshots", verify="full").lookup([1], [10], AS_OF).tier_names == ["pair"]

    again = execute("export_snapshot", spark, make_config(*settings), AS_OF).report
    assert files_of(root / "snapshots") == files_of(tmp_path / "calm" / "snapshots")
    assert again.metrics["bytes_reused"] == calm.metrics["bytes_reused"]
    assert Snapshot.open(root / "snapshots", verify="full").lookup([1], [11], AS_OF).embedding.tolist() == [[5, 5]]
    # What the killed one left is rubbish to gc.
    snapshots.gc(root / "snapshots", keep=10, abandoned_hours=0, dry_run=False)
    assert not [path for path in (root / "snapshots").iterdir() if path.name.startswith(".staging-")]
