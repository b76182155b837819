"""What is wrong with an export never goes live: each check fails on its own fault, in one line, and CURRENT stays."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from jobs import export_snapshot
from jobs.common.errors import RunFailed
from jobs.common.failures import explain
from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.writer import sha256_of
from tests.conftest import AS_OF, hours
from tests.jobs.test_export_snapshot import mean, near, packed, pair

pytestmark = pytest.mark.spark

USERS, ITEMS = (1, 2, 3, 4), (10, 11)
NAN = np.array([np.nan, 1], "<f2").tobytes()


@pytest.fixture
def world(fill):
    """world(pairs, means, as_of): a slice of the tables. User 9 has no mean and is like user 2."""

    def write(pairs, means, as_of=AS_OF):
        fill("pair_embeddings", pairs, as_of)
        fill("user_embeddings", means, as_of)

    good = (
        [pair(user, item, user, item) for user in USERS for item in ITEMS],
        [mean(user, AS_OF - hours(6), user, user) for user in USERS],
    )
    write(*good, AS_OF - hours(6))
    write(good[0], [mean(user, AS_OF, user, user) for user in USERS])
    fill("user_neighbors", [near(9, (2, 0.75))], AS_OF - hours(24))
    return write


@pytest.fixture
def export(world, make_run, root, capsys):
    """export("what is wrong", overrides...): an export that must fail with this; one of six hours before is live."""
    folder = root / "snapshots"

    def run(as_of, *overrides):
        usual = ("export_snapshot.shards=1", "serving.ttl_hours=6", "serving.max_user_age_hours=6")
        return export_snapshot.run(*make_run("export_snapshot", as_of, *usual, *overrides))

    run(AS_OF - hours(6))
    live = Snapshot.open(folder).snapshot_id
    there = sorted(path.name for path in folder.iterdir())

    def refused(message, *overrides):
        with pytest.raises(RunFailed) as caught:
            run(AS_OF, *overrides)
        assert explain(caught.value) == 1
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line == f"failed: {caught.value}"
        assert message in line and line.endswith("; CURRENT was left alone")
        assert (folder / "CURRENT").read_text() == live + "\n"
        assert sorted(path.name for path in folder.iterdir()) == there

    refused.run = run
    return refused


def rewrite(path, user, column, value):
    """Another value in the first row of a user, and not one byte more or less."""
    size = path.stat().st_size
    with pa.ipc.open_file(path.read_bytes()) as file:
        batch = file.get_batch(0)
    values = batch.column(column).to_pylist()
    values[batch.column("user_id").to_pylist().index(user)] = value
    place = batch.schema.get_field_index(column)
    arrays = [*batch.columns[:place], pa.array(values, batch.schema.field(place).type), *batch.columns[place + 1 :]]
    with pa.ipc.new_file(str(path), batch.schema) as file:
        file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=batch.schema))
    assert path.stat().st_size == size


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(packed(1, 10))] ^= 1
    path.write_bytes(content)


def test_files_that_are_not_what_was_written_or_not_what_the_tables_hold(export, monkeypatch):
    """Files are changed between their writing and their validation; `fits`: with hashes of what stands in them now."""
    assemble = export_snapshot.assemble

    def damage(kind, change, *, fits):
        def assembled(summaries, folder, **more):
            manifest = assemble(summaries, folder, **more)
            change(folder / f"shard-00000-of-00001/{kind}.arrow")
            hashed = [replace(file, sha256=sha256_of(folder / file.path)) for file in manifest.files]
            return replace(manifest, files=tuple(hashed)) if fits else manifest

        monkeypatch.setattr(export_snapshot, "assemble", assembled)

    for sample in (200, 0):
        damage("pairs", flip, fits=False)
        export("pairs.arrow is damaged, its sha256 is not the manifest's", f"export_snapshot.sample={sample}")
    means_first = 'serving.tiers=["user_mean", "neighbor_mean"]'  # decides what is served, not what is checked
    for kind, user, column, value, message, *overrides in (
        ("pairs", 3, "embedding", packed(3, 9), "1 of 13 sampled lookups differ from the tables, first user 3 item 1"),
        ("pairs", 3, "embedding", NAN, "first user 3 item 1"),
        ("pairs", 3, "computed_at", 0, "first user 3 item 1", means_first),
        ("users", 3, "embedding", packed(3, 9), "1 of 13 sampled lookups differ from the tables, first user 3 user_me"),
        ("users", 9, "embedding", packed(1, 1), "first user 9 neighbor_mean"),
        ("users", 9, "similarity", 0.5, "first user 9 neighbor_mean", means_first),
    ):
        damage(kind, lambda path, of=(user, column, value): rewrite(path, *of), fits=True)
        export(message, *overrides)
    export.run(AS_OF, "export_snapshot.sample=0")  # what only the sample can see


def test_contents_that_must_not_go_live(export, world, monkeypatch):
    pairs = [pair(user, item, user, item) for user in USERS for item in ITEMS]
    means = [mean(user, AS_OF, user, user) for user in USERS]
    nan = {"user_id": 1, "item_id": 1, "embedding": NAN}
    for rows, of_users, message, *overrides in (
        ([*pairs, nan], means, "stored vectors are bad: 1 not finite"),
        ([*pairs, pair(1, 1, 1, 2, 3)], means, "stored vectors are bad: 1 not of 2 dimensions"),
        (pairs, [*means[1:], mean(1, AS_OF, 1)], "stored vectors are bad: 1 not of 2 dimensions"),
        ([], means, "there is no fresh pair, the previous snapshot"),
        (pairs[:3], means, "3 pairs after 8 in the previous snapshot"),
        (pairs, means[:2], "3 users after 5", "export_snapshot.min_users_ratio=0.7"),
        ([{**row, "embedding": packed(row["user_id"] * 2, row["item_id"] * 2)} for row in pairs], means, "mean norm"),
    ):
        world(rows, of_users)
        export(message, *overrides)

    world(pairs, means)
    with monkeypatch.context() as patch:
        read = export_snapshot.recent_pair_embeddings
        patch.setattr(
            export_snapshot, "recent_pair_embeddings", lambda *key: read(*key).where("user_id + item_id != 11")
        )
        export("the files hold 7 pairs, the table has 8")
    with monkeypatch.context() as patch:
        of_users = export_snapshot.fresh_user_means
        patch.setattr(export_snapshot, "fresh_user_means", lambda *key: of_users(*key).where("user_id != 1"))
        export("the files hold 3 users' own means, the table has 4")
    export.run(AS_OF)  # nothing but the faults was in the way
