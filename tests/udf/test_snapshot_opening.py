"""What opens and what does not: damaged, missing, foreign and older files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.common import snapshots
from solaris_udf.snapshot import Snapshot, SnapshotError, reader
from solaris_udf.snapshot.layout import MANIFEST
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.tiers import NONE, PAIR
from tests.udf.snapshot_fakes import LATER, NEW, OLD, answer, flip, own, pair_hash, publish_snapshot, user_hash


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


def body_of(path):
    """From which byte of a file to which its columns lie."""
    with pa.memory_map(str(path)) as file:
        start = file.read_buffer().address
        file.seek(0)
        batch = pa.ipc.open_file(file).get_batch(0)
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
        return range(
            min(buffer.address for buffer in buffers) - start,
            max(buffer.address + buffer.size for buffer in buffers) - start,
        )


@pytest.mark.parametrize("file", ["pairs.arrow", "pairs.buckets.arrow"])
def test_unverified_damage_spoils_no_more_than_itself_and_never_the_process(tmp_path, file):
    """A flipped byte of the pairs can spoil one of them; one of the offsets only hides pairs, or is noticed."""
    users, kept = np.arange(60), 50  # the last ten have no pair
    name = publish_snapshot(tmp_path, {(user, 1): ((user, 2.0), 0) for user in range(kept)}, shards=1)
    path = tmp_path / name / "shard-00000-of-00001" / file
    content, body = path.read_bytes(), body_of(path)
    vectors = np.where(users[:, None] < kept, np.stack([users, np.full(60, 2)], axis=1), 0)
    seen = set()
    for place in range(0, len(content), 5):
        path.write_bytes(content)
        flip(path, place)
        with pytest.raises(SnapshotError):
            Snapshot.open(tmp_path, verify="full")
        try:
            found = Snapshot.open(tmp_path, verify="none").lookup(users, [1] * 60, 7_000_000)
        except SnapshotError as error:
            assert "\n" not in str(error)
            seen.add("error")
            continue
        assert set(found.tier.tolist()) <= {NONE, PAIR}
        if place not in body:
            continue
        missed = found.tier != np.where(users < kept, PAIR, NONE)
        wrong = ~missed & (
            (found.embedding != vectors).any(axis=1) | (found.age_seconds != np.where(users < kept, 7, -1))
        )
        seen |= {kind for kind, keys in (("miss", missed), ("wrong", wrong)) if keys.any()}
        if file == "pairs.arrow":
            assert missed.sum() + wrong.sum() <= 1
        else:
            assert not wrong.any()
    assert seen == ({"error", "miss", "wrong"} if file == "pairs.arrow" else {"error", "miss"})
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SnapshotError):
        Snapshot.open(tmp_path, verify="none")


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


def test_the_reader_imports_numpy_and_pyarrow_only(tmp_path):
    """Also when it opens and answers: pyarrow would import pandas, for a second, to turn an array into numpy's."""
    publish_snapshot(tmp_path, OLD, {1: own((1.0, 2.0), 0)})
    code = (
        "import sys; from solaris_udf.snapshot import SnapshotFollower; "
        "follower = SnapshotFollower(sys.argv[1], engine='numpy'); print(follower.lookup([1], [1], 0).tier_names); "
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'pandas', 'pydantic', 'pyspark', 'torch', 'faiss', 'numba', 'jobs'}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "['pair']\n[]\n"


def test_the_check_values_of_the_format_page_are_right():
    page = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text()
    for value in (user_hash(0), user_hash(-1), pair_hash(1, 2)):
        assert f"0x{value:016x}" in page
