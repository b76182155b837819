"""Small snapshots from dictionaries, and the plain-Python rules that a lookup must agree with."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from solaris_udf.codec import encode
from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.publish import publish
from solaris_udf.snapshot.shards import ShardSummary, write_shards
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.validate import assemble
from solaris_udf.tiers import TIER_CODES, TierPolicy

LOW, HIGH = -(2**63), 2**63 - 1
MASK = 2**64 - 1
HOUR = 3_600_000_000
ORDER = ("pair", "user_mean", "neighbor_pair", "neighbor_mean")
POLICY = TierPolicy(ORDER, 24 * HOUR, 48 * HOUR, 0.0)
# Two snapshots' pairs, and what makes the second one later than the first.
OLD = {(1, 1): ((1.0, 1.0), 0), (2, 2): ((2.0, 2.0), 0)}
NEW = {(1, 1): ((5.0, 5.0), 0), (3, 3): ((3.0, 3.0), 0)}
LATER = {"slice_name": "20260103T060000Z", "as_of": 6 * HOUR}


def xxh64(value, seed):
    """XXH64 of eight bytes, from the algorithm's description."""
    primes = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)

    def rotate(number, bits):
        return ((number << bits) | (number >> (64 - bits))) & MASK

    mixed = rotate((value & MASK) * primes[1] & MASK, 31) * primes[0] & MASK
    digest = rotate(((seed + primes[4] + 8) & MASK) ^ mixed, 27) * primes[0] + primes[3] & MASK
    digest = (digest ^ (digest >> 33)) * primes[1] & MASK
    digest = (digest ^ (digest >> 29)) * primes[2] & MASK
    return digest ^ (digest >> 32)


def user_hash(user):
    return xxh64(user, 42)


def pair_hash(user, item):
    return xxh64(item, user_hash(user))


def batch_of(pairs, users, shards, dim, codec="float16"):
    """One Arrow batch of write_shards' input. pairs: {(user, item): (vector, at)}; users: {user: dict(vector, at, tier,
    source, similarity, neighbors)}, tier by name and neighbors [(user, similarity)]."""
    rows = []
    for (user, item), (vector, at) in pairs.items():
        key = (user_hash(user) % 2**32 % shards, 0, pair_hash(user, item), user, item)
        rows.append((*key, vector, at, None, None, None, None))
    for user, one in users.items():
        near = [{"user_id": other, "similarity": similarity} for other, similarity in one["neighbors"]]
        rows.append(
            (
                user_hash(user) % 2**32 % shards,
                1,
                user_hash(user),
                user,
                0,
                one["vector"],
                one["at"],
                TIER_CODES[one["tier"]],
                one["source"],
                one["similarity"],
                near,
            )
        )
    rows.sort(key=lambda row: row[:5])
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in range(11)]
    vectors = np.array(columns[5], np.float32).reshape(len(rows), dim)
    types = [
        pa.int32(),
        pa.int8(),
        None,
        pa.int64(),
        pa.int64(),
        None,
        pa.int64(),
        pa.int8(),
        pa.int64(),
        pa.float32(),
        pa.list_(pa.struct([("user_id", pa.int64()), ("similarity", pa.float32())])),
    ]
    names = [
        "shard",
        "kind",
        "",
        "user_id",
        "item_id",
        "",
        "computed_at",
        "tier",
        "source_user",
        "similarity",
        "neighbors",
    ]
    arrays = {name: pa.array(column, kind) for name, column, kind in zip(names, columns, types, strict=True) if name}
    arrays["embedding"], arrays["codec"] = encode(vectors, codec), pa.array([codec] * len(rows), pa.string())
    return pa.RecordBatch.from_pydict(arrays)


def write_snapshot(
    root: Path,
    pairs,
    users=None,
    *,
    shards=2,
    dim=2,
    codec="float16",
    policy=POLICY,
    neighbors=3,
    slice_name="20260103T000000Z",
    as_of=0,
    version="m1",
    split=None,
    staging=".staging-test",
):
    """Writes the files below root/staging and returns their manifest; split: rows of each batch of the input."""
    batch = batch_of(pairs, users or {}, shards, dim)
    size = split or max(1, batch.num_rows)
    batches = [batch.slice(start, size) for start in range(0, batch.num_rows, size)]
    out = write_shards(
        iter(batches), folder=str(root / staging), shards=shards, codec=codec, dim=dim, neighbors=neighbors
    )
    summaries = [ShardSummary.parse(text) for part in out for text in part.column("summary").to_pylist()]
    return assemble(
        summaries,
        root / staging,
        slice_name=slice_name,
        as_of_micros=as_of,
        model_version=version,
        codec=codec,
        shards=shards,
        dim=dim,
        neighbors=neighbors,
        policy=policy,
    )


def publish_snapshot(root: Path, pairs, users=None, **more) -> str:
    """write_snapshot and publish. Returns the id."""
    manifest = write_snapshot(root, pairs, users, **more)
    publish(LocalStorage(root), more.get("staging", ".staging-test"), manifest)
    return manifest.snapshot_id


def own(vector, at, neighbors=()):
    return {
        "vector": vector,
        "at": at,
        "tier": "user_mean",
        "source": 0,
        "similarity": 1.0,
        "neighbors": list(neighbors),
    }


def borrowed(vector, at, similarity, neighbors=()):
    return {
        "vector": vector,
        "at": at,
        "tier": "neighbor_mean",
        "source": 0,
        "similarity": similarity,
        "neighbors": list(neighbors),
    }


def cold(vector, at):
    return {"vector": vector, "at": at, "tier": "cold", "source": 0, "similarity": 0.0, "neighbors": []}


def expected(pairs, users, policy, kept, user, item, at):
    """(tier name, vector or None, age in seconds, similarity) by the documented rules, for one key."""

    def fresh(computed_at, limit):
        return 0 <= at - computed_at < limit

    for tier in policy.order:
        if tier in ("pair", "neighbor_pair"):
            own_only = [(user, 1.0)]
            others = users[user]["neighbors"][:kept] if user in users else []
            for other, similarity in own_only if tier == "pair" else others:
                similar = tier == "pair" or np.float32(similarity) >= np.float32(policy.min_similarity)
                if similar and (other, item) in pairs and fresh(pairs[other, item][1], policy.ttl_micros):
                    vector, computed_at = pairs[other, item]
                    return tier, vector, (at - computed_at) // 1_000_000, similarity
        elif user in users and users[user]["tier"] == tier:
            one = users[user]
            similar = tier != "neighbor_mean" or np.float32(one["similarity"]) >= np.float32(policy.min_similarity)
            if similar and fresh(one["at"], policy.max_user_age_micros):
                return tier, one["vector"], (at - one["at"]) // 1_000_000, one["similarity"]
    return "none", None, -1, 0.0


def answer(root):
    """The vector of pair (1, 1) in the live snapshot, every byte of which is verified."""
    return Snapshot.open(root, verify="full").lookup([1], [1], 0).embedding[0].tolist()


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
