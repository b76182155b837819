"""Publishing to and following from an S3 server on loopback (moto's)."""

import os
import threading
from datetime import UTC, datetime

import numpy as np
import pytest

from jobs.common import snapshot_copies, snapshots
from jobs.common.errors import UserError
from jobs.common.snapshot_push import push
from solaris_udf.snapshot import Snapshot, SnapshotError, SnapshotFollower
from solaris_udf.snapshot.pull import pull
from tests.object_store import SECRET, credentials, s3_server
from tests.udf.snapshot_fakes import HOUR, LATER, NEW, OLD, publish_snapshot

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[s3]'")
pytest.importorskip("moto.server", reason="moto is not installed")


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(endpoint, monkeypatch, request):
    """A client, and the URI of a bucket of this test's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in credentials(endpoint).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    bucket = f"b{abs(hash(request.node.name)) % 10**12}"
    client.create_bucket(Bucket=bucket)
    return client, f"s3://{bucket}/ads/snapshots"


def current(client, uri):
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return client.get_object(Bucket=bucket, Key=f"{prefix}/CURRENT")["Body"].read().decode()


def value(snapshot, user, item):
    return snapshot.lookup(np.array([user]), np.array([item]), HOUR).embedding[0].tolist()


def test_a_follower_elsewhere_serves_what_was_pushed_and_then_the_next(s3, tmp_path):
    client, uri = s3
    old = publish_snapshot(tmp_path / "here", OLD)
    done = snapshot_copies.to_object_store(tmp_path / "here", None, uri)
    assert (done.snapshot_id, done.live) == (old, True) and done.bytes > 0
    with SnapshotFollower(tmp_path / "there", poll_seconds=600, source=uri, engine="numpy") as follower:
        assert value(follower.snapshot, 1, 1) == [1.0, 1.0]
        new = publish_snapshot(tmp_path / "here", NEW, **LATER)
        assert not follower.poll()  # published here, not pushed yet
        snapshot_copies.to_object_store(tmp_path / "here", None, uri)
        assert follower.poll() and follower.snapshot.snapshot_id == new
        assert value(follower.snapshot, 1, 1) == [5.0, 5.0]
    assert current(client, uri) == new + "\n"
    assert snapshots.verify(tmp_path / "there") == []


def test_pushing_again_sends_nothing_and_an_older_snapshot_moves_no_pointer(s3, tmp_path):
    client, uri = s3
    old = publish_snapshot(tmp_path, OLD)
    new = publish_snapshot(tmp_path, NEW, **LATER)
    assert push(tmp_path, new, uri).live
    assert push(tmp_path, new, uri).bytes == 0
    assert not push(tmp_path, old, uri).live
    assert current(client, uri) == new + "\n"


def test_of_two_publishers_at_once_the_later_slice_wins_whoever_is_first(s3, tmp_path):
    client, uri = s3
    names = [
        publish_snapshot(tmp_path, OLD, slice_name=f"2026010{day}T000000Z", as_of=day * 24 * HOUR) for day in (2, 3)
    ]
    names.append(publish_snapshot(tmp_path, NEW, slice_name="20260104T000000Z", as_of=96 * HOUR))
    failures = []

    def publish(name):
        try:
            push(tmp_path, name, uri)
        except Exception as error:
            failures.append(error)

    for order in (names, names[::-1]):
        threads = [threading.Thread(target=publish, args=(name,)) for name in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert current(client, uri) == names[-1] + "\n"


def test_a_pointer_that_another_publisher_moved_meanwhile_is_not_overwritten(s3, tmp_path, monkeypatch):
    """The other one moves CURRENT to a later slice between this one's look and its put."""
    from jobs.common import snapshot_push

    client, uri = s3
    old, middle = (
        publish_snapshot(tmp_path, OLD),
        publish_snapshot(tmp_path, NEW, slice_name="20260102T000000Z", as_of=1),
    )
    new = publish_snapshot(tmp_path, NEW, **LATER)
    push(tmp_path, old, uri)
    look, looks = snapshot_push._Store._as_of, []

    def look_then_lose(store, name):
        found = look(store, name)
        looks.append(name)
        if len(looks) == 1:
            monkeypatch.setattr(snapshot_push._Store, "_as_of", look)
            push(tmp_path, new, uri)
        return found

    monkeypatch.setattr(snapshot_push._Store, "_as_of", look_then_lose)
    assert not push(tmp_path, middle, uri).live
    assert looks == [old] and current(client, uri) == new + "\n"


def test_a_damaged_file_in_the_store_leaves_the_folder_as_it_was(s3, tmp_path):
    client, uri = s3
    old = publish_snapshot(tmp_path / "here", OLD)
    push(tmp_path / "here", None, uri)
    assert pull(uri, tmp_path / "there") == old
    new = publish_snapshot(tmp_path / "here", NEW, **LATER)
    push(tmp_path / "here", None, uri)
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    key = f"{prefix}/{new}/shard-00000-of-00002/pairs.arrow"
    there = client.get_object(Bucket=bucket, Key=key)
    body = there["Body"].read()
    client.put_object(Bucket=bucket, Key=key, Body=bytes([body[0] ^ 1]) + body[1:], Metadata=there["Metadata"])
    for _ in range(2):
        with pytest.raises(SnapshotError, match="is damaged"):
            pull(uri, tmp_path / "there")
        assert Snapshot.open(tmp_path / "there", engine="numpy").snapshot_id == old
        assert {path.name for path in (tmp_path / "there").iterdir() if path.is_dir()} == {old}
        assert push(tmp_path / "here", None, uri).bytes == 0  # the object says that it has the hash
    client.delete_object(Bucket=bucket, Key=key)
    assert push(tmp_path / "here", None, uri).bytes == len(body)
    assert pull(uri, tmp_path / "there") == new


@pytest.fixture
def pushed(s3, tmp_path):
    """The client, the URI, the folder, and the ids of the two snapshots that were pushed from it."""
    client, uri = s3
    names = [publish_snapshot(tmp_path / "here", OLD), publish_snapshot(tmp_path / "here", NEW, **LATER)]
    for name in names:
        push(tmp_path / "here", name, uri)
    return client, uri, tmp_path / "here", names


def test_a_rollback_in_the_store_takes_the_hosts_back_and_is_noted(pushed, tmp_path):
    client, uri, here, (old, new) = pushed
    with SnapshotFollower(tmp_path / "there", poll_seconds=600, source=uri, engine="numpy") as follower:
        assert value(follower.snapshot, 1, 1) == [5.0, 5.0]
        # What somebody deleted in the store is sent again.
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{old}/shard-00001-of-00002/pairs.arrow")
        before = datetime.now(UTC)
        assert snapshot_copies.roll_back_in(uri, here) == old
        assert follower.poll() and value(follower.snapshot, 1, 1) == [1.0, 1.0]
    assert current(client, uri) == old + "\n"
    assert (here / "CURRENT").read_text() == new + "\n"
    ((moment, name),) = snapshots.rollbacks(here)
    assert name == old and before <= moment <= datetime.now(UTC)
    # Nothing here but the pin says that old is in use, and joins will ask for it.
    assert snapshots.pinned(here) == {old} and snapshots.gc(here, keep=1).snapshots == []
    assert snapshot_copies.roll_back_in(uri, here, new) == new and current(client, uri) == new + "\n"
    assert [name for _, name in snapshots.rollbacks(here)] == [old, new]


@pytest.mark.parametrize("looks", [1, 2])
def test_a_rollback_does_not_overwrite_another_publishers_move(pushed, monkeypatch, looks):
    """The other moves CURRENT after this one's first look, or between its last look and its put."""
    from jobs.common import snapshot_push

    client, uri, here, (old, _) = pushed
    third = publish_snapshot(here, OLD, slice_name="20260103T120000Z", as_of=12 * HOUR)
    get, seen = snapshot_push._Store._get, []

    def get_then_lose(store, name):
        found = get(store, name)
        seen.append(name)
        if seen.count("CURRENT") == looks:
            monkeypatch.setattr(snapshot_push._Store, "_get", get)
            push(here, third, uri)
        return found

    monkeypatch.setattr(snapshot_push._Store, "_get", get_then_lose)
    with pytest.raises(UserError, match="another publisher moved CURRENT meanwhile"):
        snapshot_copies.roll_back_in(uri, here, old)
    assert current(client, uri) == third + "\n" and snapshots.rollbacks(here) == []
    assert snapshots.pinned(here) == set()


def test_what_a_rollback_elsewhere_cannot_do_is_one_line_and_moves_nothing(pushed, tmp_path):
    client, uri, here, (old, new) = pushed
    place = f"{uri}/nothing-yet"
    for target, snapshot_id, message in (
        (place, None, "names no snapshot"),
        (uri, "x", "there is no snapshot 'x'"),
        ("/a/folder", old, "s3://BUCKET/PREFIX or redis://"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            snapshot_copies.roll_back_in(target, here, snapshot_id)
        assert "\n" not in str(caught.value)
    victim = next((here / old).rglob("pairs.arrow"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="sha256"):
        snapshot_copies.roll_back_in(uri, here)
    assert current(client, uri) == new + "\n" and snapshots.rollbacks(here) == []
    assert snapshots.pinned(here) == set()
    snapshots.pin(here, old)
    with pytest.raises(UserError, match="sha256"):
        snapshot_copies.roll_back_in(uri, here)
    assert snapshots.pinned(here) == {old}  # as it was
    assert snapshot_copies.roll_back_in(place, here, new) == new and current(client, place) == new + "\n"
    push(tmp_path / "here", new, uri)
    victim.parent.parent.rename(tmp_path / "gone")
    with pytest.raises(UserError, match="there is no snapshot before"):
        snapshot_copies.roll_back_in(uri, here)


def test_mistakes_are_one_line_without_a_credential(s3, tmp_path, monkeypatch):
    _, uri = s3
    publish_snapshot(tmp_path, OLD)
    for wrong in ("s3://", "/a/folder", f"s3://AKIAexample:{SECRET}@bucket/x"):
        with pytest.raises(UserError, match="a place for snapshots is s3://BUCKET/PREFIX") as caught:
            push(tmp_path, None, wrong)
        assert SECRET not in str(caught.value)
    with pytest.raises(UserError, match="NoSuchBucket"):
        push(tmp_path, None, "s3://nobody-made-this/x")
    with pytest.raises(SnapshotError, match="push a snapshot to"):
        pull(uri, tmp_path / "there")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="redential") as caught:
        push(tmp_path, None, uri)
    assert "\n" not in str(caught.value)
