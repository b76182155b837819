"""A disk that is full: a real file system of a few megabytes, filled up in the middle of a slice."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import jobs.embed_pairs as embed_pairs
import jobs.export_snapshot as export_snapshot
from jobs.common.failures import explain
from jobs.common.log import histories_at
from jobs.common.runs import execute
from solaris_udf.codec import decode
from solaris_udf.foundation.udf import embed_udf_of
from solaris_udf.snapshot import Snapshot
from tests.conftest import AS_OF, hours, log_row
from tests.jobs.embed_fakes import computed, description, fake
from tests.jobs.test_export_snapshot import mean, pair

pytestmark = pytest.mark.spark


@pytest.fixture
def root(tmp_path):
    """A storage root with 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system of a given size can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(filler):
    """Writes until nothing fits."""
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def assert_one_line(caught, root, capsys):
    assert explain(caught.value) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: the disk of") and str(root) in told and "is full" in told


def test_a_full_disk_is_one_clear_line_nothing_half_written_and_the_next_try_succeeds(
    spark, root, fill, tables, make_config, capsys
):
    fill("ranking_log", [log_row(user, 7, AS_OF - hours(1)) for user in range(3)])
    for name in ("user_histories", "job_runs"):  # as after earlier slices
        tables.create(name)
    fill_disk(root / "filler")
    with pytest.raises(Exception) as caught:
        execute("update_histories", spark, make_config(), AS_OF)
    assert_one_line(caught, root, capsys)
    assert tables.read("user_histories").isEmpty()

    (root / "filler").unlink()
    execute("update_histories", spark, make_config(), AS_OF)
    assert sorted(row.user_id for row in histories_at(tables, AS_OF).collect()) == [0, 1, 2]


def filling_model(log, root):
    """The fake model of embed_pairs, in whose worker the disk fills up in the second chunk."""

    def load():
        model = fake(log)()

        def start(state, index, items):
            if list(Path(root).rglob("chunk-*/_SUCCESS")) and not Path(log, "filled").exists():
                Path(log, "filled").touch()
                fill_disk(Path(root) / "filler")
            return model.start_pairs(state, index, items)

        return replace(model, start_pairs=start)

    return load


@pytest.mark.parametrize("stage", ["the item table", "inference", "the table"])
def test_embed_pairs_on_a_disk_that_fills_up_publishes_nothing_and_goes_on_later(
    spark, root, fill, tables, make_config, capsys, tmp_path, monkeypatch, stage
):
    """24 pairs in two chunks; the disk is full before the first one, amid the second, or when both are there."""
    log, filler = tmp_path / "calls", root / "filler"
    log.mkdir()
    load = filling_model(str(log), str(root)) if stage == "inference" else fake(str(log))
    publish = embed_pairs._publish
    monkeypatch.setattr(embed_pairs, "_model", lambda _: (Path("fake"), description()))
    monkeypatch.setattr(
        embed_pairs,
        "embed_udf",
        lambda folder, items, *, codec, threads, limits, **_: embed_udf_of(
            load, items, codec=codec, threads=threads, limits=limits
        ),
    )
    if stage == "the table":
        monkeypatch.setattr(embed_pairs, "_publish", lambda *given: (fill_disk(filler), publish(*given))[1])
    fill("candidate_pairs", [{"user_id": user, "item_id": item} for user in range(8) for item in range(3)])
    for name in ("pair_embeddings", "rejected_rows", "job_runs"):  # as after earlier slices
        tables.create(name)
    if stage == "the item table":
        fill_disk(filler)
    config = make_config("embed_pairs.chunk_pairs=12")
    with pytest.raises(Exception) as caught:
        execute("embed_pairs", spark, config, AS_OF)
    assert filler.exists()
    assert_one_line(caught, root, capsys)
    assert tables.read("pair_embeddings").isEmpty()
    before = len(computed(log))

    filler.unlink()
    monkeypatch.setattr(embed_pairs, "_publish", publish)
    report = execute("embed_pairs", spark, config, AS_OF).report
    stored = {(row.user_id, row.item_id): row.embedding for row in tables.read("pair_embeddings").collect()}
    assert set(stored) == {(user, item) for user in range(8) for item in range(3)}
    assert all(decode([bytes(stored[key])])[0].tolist() == [0, key[1], 1] for key in stored)
    # What was saved before the disk was full is not computed again.
    assert len(computed(log)) == before + 24 - report.metrics["reused"]
    saved = {"the item table": (0, 0), "inference": (1, 23), "the table": (24, 24)}[stage]
    assert saved[0] <= report.metrics["reused"] <= saved[1]


@pytest.mark.parametrize("stage", ["the shards", "the manifest", "the table"])
def test_export_snapshot_on_a_full_disk_leaves_current_alone_and_succeeds_later(
    spark, root, fill, tables, make_config, capsys, monkeypatch, stage
):
    """The disk is full before the files are written, when all are there, or when the snapshot is live."""
    filler, folder = root / "filler", root / "snapshots"
    config = make_config("export_snapshot.shards=2")

    def served():
        return Snapshot.open(folder, verify="full").lookup([1, 2], [10, 10], AS_OF).embedding.tolist()

    for x, as_of in ((1, AS_OF - hours(6)), (5, AS_OF)):
        fill("pair_embeddings", [pair(user, 10, user, x) for user in range(100)], as_of)
        fill("user_embeddings", [mean(user, as_of, 1, 1) for user in range(100)], as_of)
    execute("export_snapshot", spark, config, AS_OF - hours(6))
    before = (folder / "CURRENT").read_text()

    if stage == "the shards":
        fill_disk(filler)
    else:
        step = {"the manifest": "assemble", "the table": "snapshot_row"}[stage]
        usual = getattr(export_snapshot, step)
        monkeypatch.setattr(export_snapshot, step, lambda *given, **more: (usual(*given, **more), fill_disk(filler))[0])
    with pytest.raises(Exception) as caught:
        execute("export_snapshot", spark, config, AS_OF)
    assert_one_line(caught, root, capsys)
    live = stage == "the table"  # it is named last of all
    assert served() == ([[1, 5], [2, 5]] if live else [[1, 1], [2, 1]])
    assert ((folder / "CURRENT").read_text() == before) == (not live)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == (2 if live else 1)

    filler.unlink()
    monkeypatch.undo()
    execute("export_snapshot", spark, config, AS_OF)
    assert served() == [[1, 5], [2, 5]]
    assert {row.pairs for row in tables.read("snapshots").collect()} == {100}
    assert tables.slices("snapshots") == ["20260102T180000Z", "20260103T000000Z"]
