"""The lookup snapshot against LMDB, Redis and a Python dict.

    python bench/snapshot.py [--quick] [--json FILE]

5M pairs (--quick: 500,000) of 50 items a user x 64 float16; nine users in ten have a mean of their own, the others
three neighbours. A request is 1,000 keys of random users, half of them pairs that are not stored, and asks for one
slot: the pair's vector or else the user's. Every store is asked for the same keys and must hand back float32
[1000, 64]; the peers make a second call for the users of missed pairs, and know neither neighbours, ages nor tiers. All
on one thread but where it says so. At the end export_snapshot takes as many pairs from Delta tables to a live
snapshot. A peer that is not installed is left out, which is said.
"""

import importlib.util
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from measure import Figure, arguments, at_least, at_most, interleaved, report
from snapshot_export import export_rate

from solaris_udf.snapshot import Snapshot, SnapshotFollower
from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.publish import publish, set_current
from solaris_udf.snapshot.shards import ShardSummary, write_shards
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.validate import assemble
from solaris_udf.tiers import TierPolicy

DIM, ITEMS, BATCH, SHARDS, NEIGHBORS = 64, 50, 1000, 6, 3
AT = 2_000_000
POLICY = TierPolicy.of_hours(("pair", "user_mean", "neighbor_pair", "neighbor_mean"), 24, 48, 0)


class World:
    """The stored pairs and users, and the requests."""

    def __init__(self, pairs: int, requests: int) -> None:
        rng = np.random.default_rng(0)
        self.ids = rng.integers(-(2**62), 2**62, pairs // ITEMS)
        self.own = rng.random(len(self.ids)) < 0.9
        self.users = np.repeat(self.ids, ITEMS)
        self.items = np.tile(np.arange(ITEMS) * 7919, len(self.ids))
        self.vectors = rng.standard_normal((pairs, DIM), dtype=np.float32).astype("<f2")
        self.means = rng.standard_normal((len(self.ids), DIM), dtype=np.float32).astype("<f2")
        self.near = rng.choice(self.ids, (len(self.ids), NEIGHBORS))
        self.requests = []
        for _ in range(requests):
            users, items = rng.choice(self.ids, BATCH), rng.integers(0, ITEMS, BATCH) * 7919
            self.requests.append((users, np.where(rng.random(BATCH) < 0.5, items, items + 1)))

    def shard_batches(self, shard: int) -> Iterator[pa.RecordBatch]:
        """The rows of one shard as an export's task gets them."""
        rows = np.flatnonzero(shard_of(hash_users(self.users), SHARDS) == shard)
        rows = rows[np.argsort(hash_pairs(hash_users(self.users[rows]), self.items[rows]))]
        for start in range(0, len(rows), 10_000):
            part = rows[start : start + 10_000]
            yield _batch(shard, 0, self.users[part], self.items[part], self.vectors[part], None)
        rows = np.flatnonzero(shard_of(hash_users(self.ids), SHARDS) == shard)
        rows = rows[np.argsort(hash_users(self.ids[rows]))]
        for start in range(0, len(rows), 10_000):
            part = rows[start : start + 10_000]
            yield _batch(
                shard, 1, self.ids[part], np.zeros(len(part), int), self.means[part], (self.own[part], self.near[part])
            )


def _batch(shard, kind, users, items, vectors, more):
    count = len(users)
    own, near = more if more else (np.ones(count, bool), np.zeros((count, 0), int))
    lists = pa.ListArray.from_arrays(
        np.arange(count + 1, dtype=np.int32) * near.shape[1],
        pa.StructArray.from_arrays(
            [pa.array(near.ravel()), pa.array(np.full(near.size, 0.5, np.float32))], ["user_id", "similarity"]
        ),
    )
    offsets = np.arange(count + 1, dtype=np.int32) * 2 * DIM
    stored = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(vectors.tobytes())])
    return pa.RecordBatch.from_pydict(
        {
            "shard": np.full(count, shard, np.int32),
            "kind": np.full(count, kind, np.int8),
            "user_id": users,
            "item_id": items,
            "embedding": stored,
            "codec": pa.array(["float16"] * count),
            "computed_at": np.full(count, 1_000_000),
            "tier": np.where(own, 2, 4).astype(np.int8),
            "source_user": users,
            "similarity": np.where(own, 1, 0.5).astype(np.float32),
            "neighbors": lists,
        }
    )


def export(world: World, root: Path) -> Manifest:
    """Writes and publishes the snapshot."""
    staging = root / ".staging-bench"
    summaries = []
    for shard in range(SHARDS):
        parts = write_shards(
            world.shard_batches(shard),
            folder=str(staging),
            shards=SHARDS,
            codec="float16",
            dim=DIM,
            neighbors=NEIGHBORS,
        )
        summaries += [ShardSummary.parse(text) for part in parts for text in part.column("summary").to_pylist()]
    manifest = assemble(
        summaries,
        staging,
        slice_name="20260103T000000Z",
        as_of_micros=0,
        model_version="bench",
        codec="float16",
        shards=SHARDS,
        dim=DIM,
        neighbors=NEIGHBORS,
        policy=POLICY,
    )
    publish(LocalStorage(root), staging.name, manifest)
    return manifest


def keys_of(users, items) -> list[bytes]:
    """16 bytes a pair."""
    raw = np.stack([users, items], 1).astype(">i8").tobytes()
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]


def vectors_of(found: list[bytes | None], fall_back: Callable[[list[int]], list[bytes | None]]) -> np.ndarray:
    """float32 [n, 64] from a peer's answers; fall_back gives those of the missed ones by their places."""
    missed = [place for place, value in enumerate(found) if value is None]
    for place, value in zip(missed, fall_back(missed), strict=True):
        found[place] = value
    nothing = bytes(2 * DIM)
    return np.frombuffer(b"".join([value or nothing for value in found]), "<f2").reshape(-1, DIM).astype(np.float32)


def with_lmdb(world: World, folder: Path):
    import lmdb

    environment = lmdb.open(str(folder), map_size=1 << 34, readahead=False, writemap=True, sync=False)
    keys = keys_of(world.users, world.items)
    with environment.begin(write=True) as transaction:
        order = sorted(range(len(keys)), key=keys.__getitem__)
        transaction.cursor().putmulti(((keys[row], world.vectors[row].tobytes()) for row in order), append=True)
        owners = world.ids.astype(">i8").tobytes()
        transaction.cursor().putmulti(
            (owners[8 * row : 8 * row + 8], world.means[row].tobytes()) for row in np.flatnonzero(world.own)
        )

    def ask(users, items):
        keys = keys_of(users, items)
        with environment.begin(buffers=False) as transaction:
            get = transaction.get
            return vectors_of([get(key) for key in keys], lambda missed: [get(keys[place][:8]) for place in missed])

    return ask


@contextmanager
def redis_server(folder: Path):
    """A redis-server of its own on a loopback port, without persistence."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


def with_redis(world: World, port: int):
    import redis

    client = redis.Redis(port=port, protocol=2)
    for _ in range(100):
        with suppress(redis.ConnectionError):
            client.ping()
            break
        time.sleep(0.1)
    # Plain bulk protocol: ten times as fast to load as commands through the client.
    head = b"*%d\r\n$4\r\nMSET\r\n"
    with socket.create_connection(("127.0.0.1", port)) as raw:
        for ids, vectors in (
            (keys_of(world.users, world.items), world.vectors),
            (keys_of(world.ids, world.ids), world.means),
        ):
            size = 16 if vectors is world.vectors else 8
            chosen = range(len(ids)) if size == 16 else np.flatnonzero(world.own).tolist()
            for start in range(0, len(chosen), 5000):
                rows = chosen[start : start + 5000]
                parts = [head % (1 + 2 * len(rows))]
                stored = vectors[list(rows)].tobytes()
                for place, row in enumerate(rows):
                    value = stored[place * 2 * DIM : (place + 1) * 2 * DIM]
                    parts.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (size, ids[row][:size], 2 * DIM, value))
                raw.sendall(b"".join(parts))
                assert raw.recv(5) == b"+OK\r\n"

    def ask(users, items):
        keys = keys_of(users, items)
        return vectors_of(client.mget(keys), lambda missed: client.mget([keys[place][:8] for place in missed]))

    return ask


def with_dict(world: World):
    pairs = dict(zip(keys_of(world.users, world.items), range(len(world.users)), strict=True))
    owners = {struct.pack(">q", world.ids[row]): row for row in np.flatnonzero(world.own).tolist()}

    def ask(users, items):
        keys = keys_of(users, items)
        rows = np.array([pairs.get(key, -1) for key in keys])
        out = world.vectors[rows].astype(np.float32)
        missed = np.flatnonzero(rows < 0)
        found = np.array([owners.get(keys[place][:8], -1) for place in missed.tolist()])
        out[missed] = np.where(found[:, None] < 0, 0, world.means[found])
        return out

    return ask


def in_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def latencies(ask: Callable[..., object], requests, seconds: float) -> tuple[np.ndarray, int]:
    """Seconds of each request made in that time, and how many failed."""
    taken, failed, end, place = [], 0, time.perf_counter() + seconds, 0
    while (start := time.perf_counter()) < end:
        try:
            ask(*requests[place % len(requests)], AT, user_vectors=False)
        except Exception:
            failed += 1
        taken.append(time.perf_counter() - start)
        place += 1
    return np.array(taken), failed


def swapping(root: Path, manifest: Manifest, world: World, seconds: float) -> list[Figure]:
    """Latency and failures while CURRENT moves every second between two snapshots, against a still one."""
    storage = LocalStorage(root)
    other = replace(manifest, slice="20260103T060000Z", as_of_micros=1)
    shutil.copytree(
        root / manifest.snapshot_id, root / ".staging-other", copy_function=lambda a, b: Path(b).hardlink_to(a)
    )
    (root / ".staging-other" / "manifest.json").unlink()
    publish(storage, ".staging-other", other)
    with SnapshotFollower(root, poll_seconds=0.05) as follower:
        latencies(follower.lookup, world.requests, 1)
        steady, _ = latencies(follower.lookup, world.requests, seconds)
        stop = threading.Event()

        def flip() -> None:
            turn = 0
            while not stop.wait(1):
                set_current(storage, (manifest, other)[turn % 2].snapshot_id)
                turn += 1

        thread = threading.Thread(target=flip)
        thread.start()
        rolling, failed = latencies(follower.lookup, world.requests, seconds)
        stop.set()
        thread.join()
        swaps = follower.swaps
    before, now = (float(np.percentile(taken, 99)) for taken in (steady, rolling))
    return [
        Figure("follower: swaps under load", swaps, ""),
        at_most("follower: failed lookups", failed, "", 0),
        Figure("follower: p99 of a request, steady", before * 1e6, "us"),
        at_most("follower: p99 while swapping / steady", now / before, "x", 2),
    ]


def main() -> None:
    options = arguments(__doc__)
    world = World(500_000 if options.quick else 5_000_000, 100 if options.quick else 200)
    engines = ["numpy", *(["numba"] if importlib.util.find_spec("numba") else [])]
    figures, left_out = [], [] if len(engines) == 2 else ["numba"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = time.perf_counter()
        manifest = export(world, folder / "snapshots")
        writing = time.perf_counter() - start
        raw = manifest.pairs * (2 * DIM + 16) + manifest.users * (2 * DIM + 8)
        figures += [
            Figure("write from sorted rows, one core", manifest.pairs / writing, "pairs/s"),
            at_most("disk / raw vectors and keys", manifest.total_bytes / raw, "x", 1.15),
        ]
        snapshots = {engine: Snapshot.open(folder / "snapshots", engine=engine) for engine in engines}

        def ours(engine: str, slots: bool) -> Callable[..., object]:
            return lambda users, items: snapshots[engine].lookup(users, items, AT, user_vectors=slots).embedding

        asks = {f"solaris, {engine}": ours(engine, False) for engine in engines}
        asks |= {f"solaris, {engine}, both slots": ours(engine, True) for engine in engines}
        if importlib.util.find_spec("lmdb"):
            asks["LMDB"] = with_lmdb(world, folder / "lmdb")
        else:
            left_out.append("LMDB (pip install lmdb)")
        if shutil.which("redis-server") and importlib.util.find_spec("hiredis"):
            asks["Redis, MGET"] = with_redis(world, stack.enter_context(redis_server(folder)))
        else:
            left_out.append("Redis (apt-get install redis-server; pip install redis hiredis)")
        asks["Python dict"] = with_dict(world)

        # All agree where the pair or the user's own mean answers.
        for users, items in world.requests[:3]:
            answer = snapshots["numpy"].lookup(users, items, AT)
            known = np.isin(answer.tier, (1, 2))
            for name, ask in asks.items():
                np.testing.assert_array_equal(ask(users, items)[known], answer.embedding[known], err_msg=name)

        def rounds(ask: Callable[..., object]) -> Callable[[], None]:
            def go() -> None:
                for users, items in world.requests:
                    ask(users, items)

            return go

        tasks = {name: rounds(ask) for name, ask in asks.items()}
        tasks |= {f"two {engine}": lambda work=tasks[f"solaris, {engine}"]: in_threads(2, work) for engine in engines}
        tasks |= {
            f"open {engine}": lambda engine=engine: Snapshot.open(folder / "snapshots", engine=engine)
            for engine in engines
        }
        seconds = interleaved(tasks, 5 if options.quick else 7)
        each = {name: seconds[name] / (len(world.requests) * BATCH) * 1e9 for name in asks}
        for name, nanoseconds in each.items():
            targets = {"solaris, numpy": 400, "solaris, numba": 200}
            figures.append(
                at_most(name, nanoseconds, "ns/key", targets[name])
                if name in targets
                else Figure(name, nanoseconds, "ns/key")
            )
        best = each[f"solaris, {engines[-1]}"]
        for name, least in (("LMDB", 5), ("Redis, MGET", 6)):
            if name in each:
                for engine in engines:
                    mine = each[f"solaris, {engine}"]
                    figures.append(at_least(f"{name} / solaris, {engine}", each[name] / mine, "x", least))
        for engine in engines:
            gain = 2 * seconds[f"solaris, {engine}"] / seconds[f"two {engine}"]
            figures.append(at_least(f"two threads / one, {engine}", gain, "x", 1.6))
            figures.append(at_most(f"open, {engine}", seconds[f"open {engine}"] * 1e3, "ms", 50))
        figures += swapping(folder / "snapshots", manifest, world, 3 if options.quick else 8)
        figures += export_rate(folder / "export", manifest.pairs)
    report(f"lookup snapshot, {manifest.pairs:,} pairs; best {best:.0f} ns a key", figures, options.json)
    for name in left_out:
        print(f"left out, not installed: {name}")


if __name__ == "__main__":
    main()
