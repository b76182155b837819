"""`solaris snapshot ...` as a user types it: what it prints, what it changes, its exit codes. There is no Java here."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.common.session import PROJECT
from solaris_udf.snapshot import Snapshot
from tests.udf.snapshot_fakes import HOUR, own, publish_snapshot

DAYS = range(1, 5)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def names(root):
    """Four snapshots, a day apart; the last one is live. Pair (1, 1) has another vector and time every day."""
    return [
        publish_snapshot(
            root / "snapshots",
            {(1, 1): ((float(day), 0.0), day), (2, day): ((3.0, 4.0), 0)},
            {1: own((1.0, 2.0), 0), 2: {**own((1.0, 2.0), 0), "tier": "neighbor_mean", "source": 1, "similarity": 0.5}},
            slice_name=f"2026010{day}T000000Z",
            as_of=day * 24 * HOUR,
        )
        for day in DAYS
    ]


@pytest.fixture
def ask(root, tmp_path, monkeypatch):
    """ask("verify", ...) -> (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)

    def run(*arguments, settings=(), config=True):
        settings = [f"--set={one}" for one in (f"storage.root={root}", *settings)] if config else []
        found = CliRunner().invoke(app, ["snapshot", *arguments, *settings])
        assert "Traceback" not in found.stderr
        return found.exit_code, found.stdout, found.stderr

    return run


def rows(shown):
    """The cells of a printed table."""
    return [[cell for cell in re.split(r"\s{2,}|\s*[│┃]\s*", line.strip()) if cell] for line in shown.splitlines()]


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.arrow"))


def damage(folder):
    victim = next(folder.rglob("pairs.arrow"))
    content = bytearray(victim.read_bytes())
    content[400] ^= 1
    victim.write_bytes(content)
    return victim


def current(folder):
    return (folder / "CURRENT").read_text().strip()


def test_list_and_inspect_show_the_manifests_figures(ask, root, names):
    folder = root / "snapshots"
    code, shown, error = ask("list")
    assert (code, error) == (0, "")
    bytes_ = [f"{size(folder / name):,}" for name in names]
    plain = [[name, "2", "1", "1", "0", count] for name, count in zip(names, bytes_, strict=True)]
    listed = [cells for cells in rows(shown) if cells and cells[0] in names]
    assert listed == [*plain[:3], [names[3], "live", *plain[3][1:]]]

    assert ask("pin", names[0]) == (0, f"{names[0]} is pinned\n", "")
    damage_manifest = folder / names[1] / "manifest.json"
    damage_manifest.write_text(damage_manifest.read_text().replace('"m1"', '"m2"'))
    shown = ask("list")[1]
    assert f"{names[0]}   pinned" in shown and "damaged:" in shown

    code, shown, error = ask("inspect")
    assert (code, error) == (0, "")
    found = {cells[0]: cells[1] for cells in rows(shown) if len(cells) == 2}
    expected = {"snapshot_id": names[3], "as_of": "1970-01-05T00:00:00+00:00", "pairs": "2", "users_own": "1"}
    expected |= {"users_neighbor": "1", "bytes": str(size(folder / names[3])), "mean_norm": "4.5", "live": "True"}
    expected |= {"pinned": "False", "dim": "2", "codec": "float16", "files": "8", "ttl_hours": "24.0"}
    assert {key: found[key] for key in expected} == expected
    found = {cells[0]: cells[1] for cells in rows(ask("inspect", names[0])[1]) if len(cells) == 2}
    assert (found["mean_norm"], found["live"], found["pinned"]) == ("3.0", "False", "True")
    for arguments in (["inspect", "x"], ["inspect", names[1]]):
        code, shown, error = ask(*arguments)
        assert (code, shown, len(error.splitlines())) == (2, "", 1)


def test_verify_tells_whole_damaged_and_missing_apart(ask, root, names):
    assert ask("verify") == (0, "every file is what the manifest says\n", "")
    victim = damage(root / "snapshots" / names[3])
    told = f"failed: {victim} is damaged, its sha256 is not the manifest's; copy or export it again\n"
    assert ask("verify") == (1, "", told)
    assert ask("verify", names[3]) == (1, "", told)
    assert ask("verify", names[0])[0] == 0
    code, _, error = ask("verify", "x")
    assert (code, error[: error.index(" below")]) == (2, "error: there is no snapshot 'x'")


def test_diff_counts_what_changed(ask, names):
    code, shown, error = ask("diff", names[0], names[1])
    assert (code, error) == (0, "")
    assert rows(shown)[0] == [f"{names[0]} → {names[1]}"]
    assert rows(shown)[2] == ["rows of", "added", "removed", "common", "changed", "recomputed"]
    assert [cells for cells in rows(shown) if cells[0] in ("pairs", "users")] == [
        ["pairs", "1", "1", "1", "1", "1"],
        ["users", "0", "0", "2", "0", "0"],
    ]
    assert ask("diff", names[0], "x")[0] == 2
    assert ask("diff", names[0])[0] == 2  # the other one is missing


def test_rollback_moves_current_and_refuses_what_is_damaged(ask, root, names):
    folder = root / "snapshots"
    assert ask("rollback") == (0, f"{names[2]} is live\n", "")
    assert current(folder) == names[2]
    assert ask("rollback", names[0]) == (0, f"{names[0]} is live\n", "")
    assert Snapshot.open(folder).lookup([1], [1], 2).embedding.tolist() == [[1, 0]]
    code, _, error = ask("rollback")
    assert (code, error) == (2, f"error: there is no snapshot before {names[0]} below {folder} to roll back to\n")
    damage(folder / names[1])
    code, _, error = ask("rollback", names[1])
    assert (code, current(folder), len(error.splitlines())) == (2, names[0], 1)
    assert [line.split()[1] for line in (folder / "ROLLBACKS").read_text().splitlines()] == [names[2], names[0]]
    code, _, error = ask("rollback", "--to", "ftp://there/x")
    assert (code, error.startswith("error: a place to roll back in is")) == (2, True)


def test_gc_says_what_it_would_remove_and_removes_it_only_when_told(ask, root, names):
    folder = root / "snapshots"
    keep_one = {"settings": ["maintain_tables.snapshot_days=0"]}
    assert ask("gc", "--keep", "1") == (0, "would remove (--delete does): nothing\n", "")  # a week's stay
    assert ask("pin", names[1])[0] == 0
    planned = f"would remove (--delete does): {names[0]}, {names[2]}\n"
    assert ask("gc", "--keep", "1", **keep_one) == (0, planned, "")
    assert all((folder / name).is_dir() for name in names)
    assert ask("gc", "--keep", "1", "--delete", **keep_one) == (0, f"removed: {names[0]}, {names[2]}\n", "")
    assert [(folder / name).is_dir() for name in names] == [False, True, False, True]
    assert ask("unpin", names[1]) == (0, f"{names[1]} is no longer pinned\n", "")
    assert ask("unpin", names[1])[0] == 2
    assert ask("pin", names[0])[0] == 2
    assert ask("gc", "--keep", "1", "--delete", **keep_one)[1] == f"removed: {names[1]}\n"
    assert ask("gc", "--keep", "0")[0] == 2
    assert ask("gc", "--keep", "one")[0] == 2


def test_pull_brings_what_is_live_and_leaves_the_host_as_it_was_if_it_is_damaged(ask, root, names, tmp_path):
    store, host = root / "snapshots", tmp_path / ("a long name " * 12) / "host"  # wider than what no terminal tells
    pull = ("pull", store.as_uri(), str(host))
    assert ask("rollback")[0] == 0
    assert ask(*pull, config=False) == (0, f"{names[2]} is live in {host}\n", "")
    assert Snapshot.open(host, verify="full").lookup([1], [1], 3).embedding.tolist() == [[3, 0]]
    damage(store / names[0])
    (store / "CURRENT").write_text(names[0] + "\n")
    code, shown, error = ask(*pull, config=False)
    assert (code, shown, len(error.splitlines()), current(host)) == (2, "", 1, names[2])
    assert "is damaged" in error
    code, _, error = ask("pull", str(tmp_path / "none"), str(host), config=False)
    assert (code, len(error.splitlines())) == (2, 1)


def test_the_command_in_a_process_of_its_own_needs_no_java(root, names, tmp_path):
    command = [sys.executable, "-m", "jobs", "snapshot", "verify", f"--set=storage.root={root}"]
    environ = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environ |= {"PATH": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    victim = damage(root / "snapshots" / names[3])
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith(f"failed: {victim} is damaged")
