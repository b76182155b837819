import shutil
import socket
import struct
import subprocess
import time

import numpy as np
import pytest

from jobs.common import snapshot_copies, snapshots
from jobs.common.errors import UserError
from solaris_udf.snapshot import Snapshot, SnapshotError, redis_export
from solaris_udf.snapshot.redis_export import export
from tests.udf.snapshot_fakes import HOUR, borrowed, own, publish_snapshot

redis = pytest.importorskip("redis")
PAIRS = {(1, 1): ((1.0, 2.0), 5), (-(2**63), 2**63 - 1): ((3.0, 4.0), 7)}
USERS = {1: own((5.0, 6.0), 9), 2: borrowed((7.0, 8.0), 11, 0.5)}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian package redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    folder = str(tmp_path_factory.mktemp("redis"))
    options = ["--port", str(number), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    with redis.Redis(port=number) as client:
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
    yield number
    server.terminate()
    server.wait()


@pytest.fixture
def client(port):
    with redis.Redis(port=port) as connection:
        connection.flushall()
        yield connection


def test_every_row_is_there_under_the_versions_prefix_and_expires(tmp_path, client, port):
    name = publish_snapshot(tmp_path, PAIRS, USERS)
    assert snapshot_copies.to_redis(tmp_path, None, f"redis://127.0.0.1:{port}", keep_hours=2) == (4, name)
    assert client.get("solaris:current") == name.encode()
    keys = {key.decode().removeprefix(f"solaris:{name}:") for key in client.scan_iter() if key != b"solaris:current"}
    assert keys == {"p:1:1", f"p:{-(2**63)}:{2**63 - 1}", "u:1", "u:2", "manifest"}
    assert client.get(f"solaris:{name}:p:1:1") == struct.pack("<q2e", 5, 1.0, 2.0)
    assert client.get(f"solaris:{name}:p:{-(2**63)}:{2**63 - 1}") == struct.pack("<q2e", 7, 3.0, 4.0)
    assert client.get(f"solaris:{name}:u:1") == struct.pack("<qBf2e", 9, 2, 1.0, 5.0, 6.0)
    assert client.get(f"solaris:{name}:u:2") == struct.pack("<qBf2e", 11, 4, 0.5, 7.0, 8.0)
    assert client.get(f"solaris:{name}:manifest") == (tmp_path / name / "manifest.json").read_bytes()
    assert all(7100 < client.ttl(f"solaris:{name}:{key}") <= 7200 for key in keys)
    assert client.ttl("solaris:current") == -1


def test_the_later_slice_stays_current(tmp_path, client):
    old = publish_snapshot(tmp_path, PAIRS)
    new = publish_snapshot(tmp_path, PAIRS, slice_name="20260103T060000Z", as_of=6 * HOUR)
    for name, live in ((old, old), (new, new), (old, new)):
        export(Snapshot.open(tmp_path, pin=name, engine="numpy"), client)
        assert client.get("solaris:current") == live.encode()
    assert client.exists(f"solaris:{old}:p:1:1", f"solaris:{new}:p:1:1") == 2


def test_a_copy_that_breaks_off_leaves_current_alone(tmp_path, client):
    old = publish_snapshot(tmp_path, PAIRS)
    export(Snapshot.open(tmp_path, engine="numpy"), client)
    many = {(1, item): ((float(item % 9), 0.0), 0) for item in range(5000)}
    publish_snapshot(tmp_path, many, slice_name="20260103T060000Z", as_of=6 * HOUR)
    memory = client.info("memory")["used_memory"]
    client.config_set("maxmemory", memory + 300_000)
    try:
        with pytest.raises(SnapshotError, match="current was left alone"):
            export(Snapshot.open(tmp_path, engine="numpy"), client)
    finally:
        client.config_set("maxmemory", 0)
    assert client.get("solaris:current") == old.encode()
    assert np.frombuffer(client.get(f"solaris:{old}:p:1:1")[8:], "<f2").tolist() == [1, 2]


@pytest.fixture
def copied(tmp_path, client, port):
    """The address, and the ids of the two snapshots that were copied, the later one current."""
    url = f"redis://127.0.0.1:{port}"
    names = [
        publish_snapshot(tmp_path, PAIRS, slice_name=f"20260103T0{hour}0000Z", as_of=hour * HOUR) for hour in (0, 6)
    ]
    for name in names:
        snapshot_copies.to_redis(tmp_path, name, url, keep_hours=1)
    assert client.get("solaris:current") == names[1].encode()
    return url, names


def test_a_rollback_moves_current_back_whole_and_is_noted(tmp_path, client, copied):
    url, (old, new) = copied
    client.delete(f"solaris:{old}:p:1:1")  # as if it had expired
    assert snapshot_copies.roll_back_in(url, tmp_path, keep_hours=2) == old
    assert client.get("solaris:current") == old.encode()
    assert client.get(f"solaris:{old}:p:1:1") == struct.pack("<q2e", 5, 1.0, 2.0)
    assert all(7100 < client.ttl(key) <= 7200 for key in client.scan_iter(f"solaris:{old}:*"))
    assert [name for _, name in snapshots.rollbacks(tmp_path)] == [old] and snapshots.pinned(tmp_path) == {old}
    assert (tmp_path / "CURRENT").read_text() == new + "\n"


@pytest.mark.parametrize("moment", ["_chunks", "_text"])
def test_a_rollback_does_not_overwrite_another_publishers_move(tmp_path, client, copied, monkeypatch, moment):
    """The other moves current while this one copies, or between its last look and its flip."""
    url, (old, _) = copied
    usual, calls = getattr(redis_export, moment), []

    def lose(*arguments):
        found = usual(*arguments)
        calls.append(arguments)
        if len(calls) == (1 if moment == "_chunks" else 2):
            client.set("solaris:current", "20260109T000000Z-m-other")
        return found

    monkeypatch.setattr(redis_export, moment, lose)
    with pytest.raises(UserError, match="another publisher moved solaris:current to '20260109T000000Z-m-other'"):
        snapshot_copies.roll_back_in(url, tmp_path, old)
    assert client.get("solaris:current") == b"20260109T000000Z-m-other"
    assert snapshots.rollbacks(tmp_path) == [] and snapshots.pinned(tmp_path) == set()


def test_without_a_current_one_a_rollback_needs_a_name(tmp_path, client, copied):
    url, (old, _) = copied
    with pytest.raises(UserError, match="other:current names no snapshot"):
        snapshot_copies.roll_back_in(url, tmp_path, prefix="other")
    assert snapshot_copies.roll_back_in(url, tmp_path, old, prefix="other") == old
    assert client.get("other:current") == old.encode()


def test_no_server_and_a_bad_address_are_one_clear_line(tmp_path):
    publish_snapshot(tmp_path, PAIRS)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"redis://127.0.0.1:{closed.getsockname()[1]}"
        for url, message in ((nobody, "Redis refused"), ("redis://h:not-a-port", "no Redis address")):
            for call in (
                lambda url=url: snapshot_copies.to_redis(tmp_path, None, url),
                lambda url=url: snapshot_copies.roll_back_in(url, tmp_path),
            ):
                with pytest.raises(UserError, match=message) as caught:
                    call()
                assert "\n" not in str(caught.value)
