"""The checks before publishing, and what the shard writer refuses."""

import json

import pyarrow as pa
import pytest

from solaris_udf.codec import decode
from solaris_udf.snapshot import SnapshotError
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.shards import write_shards
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.validate import Limits, Totals, check_against_previous, check_content, previous_manifest
from tests.udf.snapshot_fakes import LATER, batch_of, cold, own, publish_snapshot, write_snapshot


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
