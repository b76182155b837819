import importlib.util
import tempfile
import threading
from dataclasses import astuple
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solaris_udf.codec import decode, encode
from solaris_udf.snapshot import Snapshot, SnapshotError, feature_block, feature_names
from solaris_udf.snapshot.hashing import bucket_of, hash_pairs, hash_users, shard_of
from solaris_udf.snapshot.vectors import decode_rows
from solaris_udf.tiers import TierPolicy
from tests.udf.snapshot_fakes import (
    HIGH,
    HOUR,
    LOW,
    ORDER,
    POLICY,
    borrowed,
    cold,
    expected,
    own,
    pair_hash,
    publish_snapshot,
    user_hash,
    write_snapshot,
)

HAS_NUMBA = importlib.util.find_spec("numba") is not None
IDS = [LOW, LOW + 1, -1, 0, 1, 2, 2**53 + 1, HIGH]
VECTORS = st.tuples(*[st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 1024.0])] * 2)
SIMILARITY = st.sampled_from([-0.5, 0.0, 0.25, 0.5, 1.0])
TIMES = st.sampled_from([0, 1, 23 * HOUR, 24 * HOUR, 25 * HOUR, 47 * HOUR, 48 * HOUR, 49 * HOUR])


def test_the_hash_is_xxh64_of_the_eight_bytes():
    ids = np.array([*IDS, 12345678901], np.int64)
    assert hash_users(ids).tolist() == [user_hash(int(one)) for one in ids]
    assert hash_pairs(hash_users(ids), ids[::-1].copy()).tolist() == [
        pair_hash(int(user), int(item)) for user, item in zip(ids, ids[::-1], strict=True)
    ]
    assert shard_of(hash_users(ids), 7).tolist() == [user_hash(int(one)) % 2**32 % 7 for one in ids]
    assert bucket_of(hash_users(ids), 5).tolist() == [(user_hash(int(one)) >> 32) * 5 >> 32 for one in ids]


def test_every_finite_half_decodes_exactly():
    halves = np.arange(65536, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    decoded = np.empty((len(halves), 1), np.float32)
    decode_rows(halves.view(np.uint8).reshape(-1, 2), "float16", decoded)
    np.testing.assert_array_equal(
        decoded[:, 0].view(np.int32), halves.view(np.float16).astype(np.float32).view(np.int32)
    )


def as_stored(codec, vector):
    """What the codec makes of a vector, as a list; zeros for None."""
    return decode(encode([vector or (0.0, 0.0)], codec), codec)[0].tolist()


@settings(max_examples=40)
@given(st.data())
def test_a_lookup_agrees_with_a_dictionary(data):
    ids = st.sampled_from(IDS)
    pairs = data.draw(st.dictionaries(st.tuples(ids, ids), st.tuples(VECTORS, TIMES), max_size=40))
    rows = st.builds(
        lambda kind, vector, at, similarity, near: {
            "own": own(vector, at, near),
            "borrowed": borrowed(vector, at, similarity, near),
            "cold": cold(vector, at),
        }[kind],
        st.sampled_from(["own", "borrowed", "cold"]),
        VECTORS,
        TIMES,
        SIMILARITY,
        st.lists(st.tuples(ids, SIMILARITY), max_size=4),
    )
    users = data.draw(st.dictionaries(ids, rows, max_size=8))
    order = tuple(data.draw(st.permutations((*ORDER, "cold"))))[: data.draw(st.integers(1, 5))]
    policy = TierPolicy(order, 24 * HOUR, 48 * HOUR, data.draw(st.sampled_from([-1.0, 0.0, 0.5])))
    keys = data.draw(st.lists(st.tuples(ids, ids, TIMES), max_size=30))
    shards = data.draw(st.sampled_from([1, 2, 5]))
    with tempfile.TemporaryDirectory() as folder:
        split = data.draw(st.sampled_from([1, 7, None]))
        codec = data.draw(st.sampled_from(["float16", "int8"]))
        publish_snapshot(Path(folder), pairs, users, shards=shards, policy=policy, split=split, codec=codec)
        snapshot = Snapshot.open(folder, verify="full", engine="numpy")
        columns = [np.array([key[place] for key in keys], np.int64) for place in range(3)]
        answer = snapshot.lookup(*columns)
        slim = snapshot.lookup(*columns, user_vectors=False)
        if HAS_NUMBA:
            compiled = Snapshot.open(folder, engine="numba")
            for slots, other in ((True, answer), (False, slim)):
                for mine, theirs in zip(
                    astuple(compiled.lookup(*columns, user_vectors=slots)), astuple(other), strict=True
                ):
                    assert mine.dtype == theirs.dtype
                    assert mine.tobytes() == theirs.tobytes()
    user_order = tuple(tier for tier in order if tier in ("user_mean", "neighbor_mean", "cold"))
    user_policy = TierPolicy(user_order, 1, 48 * HOUR, policy.min_similarity)
    for place, (user, item, at) in enumerate(keys):
        stored = partial(as_stored, codec)
        tier, vector, age, similarity = expected(pairs, users, policy, 3, user, item, at)
        assert (answer.tier_names[place], answer.age_seconds[place]) == (tier, age)
        assert answer.embedding[place].tolist() == stored(vector)
        assert answer.similarity[place] == np.float32(similarity)
        tier, vector, age, similarity = expected({}, users, user_policy, 3, user, item, at)
        assert answer.user_embedding[place].tolist() == stored(vector)
        assert (answer.user_age_seconds[place], answer.user_similarity[place]) == (age, np.float32(similarity))
    np.testing.assert_array_equal(slim.embedding, answer.embedding)
    np.testing.assert_array_equal(slim.tier, answer.tier)
    assert slim.user_embedding.shape == (len(keys), 0)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """20,000 pairs of 400 users over 3 shards, vector (user, item) rounded; every user has a mean."""
    root = tmp_path_factory.mktemp("big")
    pairs = {(user, item): ((float(user), float(item)), 0) for user in range(400) for item in range(50)}
    users = {user: own((float(user), -1.0), 0) for user in range(400)}
    publish_snapshot(root, pairs, users, shards=3)
    return root


def test_a_batch_larger_than_a_chunk_and_an_empty_one(big):
    snapshot = Snapshot.open(big)
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, 500, 50_000), rng.integers(0, 100, 50_000)
    answer = snapshot.lookup(users, items, 1)
    hit, known = (users < 400) & (items < 50), users < 400
    assert answer.tier.tolist() == np.where(hit, 1, np.where(known, 2, 0)).tolist()
    np.testing.assert_array_equal(answer.embedding[hit], np.stack([users, items], 1)[hit].astype(np.float32))
    assert not answer.embedding[~known].any()
    assert snapshot.counters.read() == {
        "none": int((~known).sum()),
        "pair": int(hit.sum()),
        "user_mean": int((known & ~hit).sum()),
        "neighbor_pair": 0,
        "neighbor_mean": 0,
        "cold": 0,
    }
    empty = snapshot.lookup([], [])
    assert (len(empty), empty.embedding.shape, empty.embedding.dtype) == (0, (0, 2), np.float32)


@pytest.mark.slow
def test_ten_million_keys_at_once(big):
    users = np.tile(np.arange(500), 20_000)
    answer = Snapshot.open(big).lookup(users, np.full(10_000_000, 3), 1, user_vectors=False)
    assert np.bincount(answer.tier).tolist() == [2_000_000, 8_000_000]


def test_lookups_from_many_threads_are_right_and_counted(big):
    snapshot, faults = Snapshot.open(big), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            users, items = rng.integers(0, 400, 500), rng.integers(0, 50, 500)
            answer = snapshot.lookup(users, items, 1)
            if (answer.embedding != np.stack([users, items], 1)).any():
                faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert snapshot.counters.read()["pair"] == 4 * 20 * 500


def test_a_vector_of_exactly_the_limits_age_is_expired(tmp_path):
    publish_snapshot(tmp_path, {(1, 1): ((1.0, 2.0), 0)}, {1: own((3.0, 4.0), 0)})
    snapshot = Snapshot.open(tmp_path)
    times = [-1, 0, 24 * HOUR - 1, 24 * HOUR, 48 * HOUR - 1, 48 * HOUR]
    answer = snapshot.lookup([1] * 6, [1] * 6, times)
    assert answer.tier_names == ["none", "pair", "pair", "user_mean", "user_mean", "none"]
    assert answer.age_seconds.tolist() == [-1, 0, 86399, 86400, 172799, -1]
    assert answer.user_tier.tolist() == [0, 2, 2, 2, 2, 0]


def test_every_way_to_say_when(tmp_path):
    at = datetime(2026, 1, 3, 6, 0, 1, tzinfo=UTC)
    micros = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    publish_snapshot(tmp_path, {(1, 1): ((1.0, 2.0), micros - 5_000_000)})
    snapshot = Snapshot.open(tmp_path)
    india = timezone(timedelta(hours=5, minutes=30))
    for when in (at, at.astimezone(india), micros, np.datetime64("2026-01-03T06:00:01"), np.array([micros])):
        assert snapshot.lookup([1], [1], when).age_seconds.tolist() == [5]
    assert snapshot.lookup([1], [1]).tier_names == ["none"] or datetime.now(UTC) - at < timedelta(days=1)
    for bad in (at.replace(tzinfo=None), np.datetime64("NaT"), 1.5, "2026", [1, 2], 2**62, [[1]]):
        with pytest.raises(SnapshotError, match=r"^at "):
            snapshot.lookup([1], [1], bad)


@pytest.mark.parametrize(
    ("users", "items", "message"),
    [
        ([1, 2], [1], "2 keys and item_ids 1"),
        ([1.0], [1], "user_ids must be integers, not float64"),
        ([1], np.array([1.5]), "item_ids must be integers"),
        ([1], [None], "item_ids must be integers"),
        (["1"], [1], "user_ids must be integers"),
        ([True], [1], "user_ids must be integers"),
        (np.array([2**63], np.uint64), [1], "9223372036854775808, which is beyond"),
        ([2**64], [1], "user_ids"),
        ([[1]], [[1]], "one-dimensional"),
        (5, 5, "one-dimensional"),
        (pa.array([1, None]), [1, 1], "user_ids must be integers"),
    ],
)
def test_ids_that_are_none_get_a_clear_error(big, users, items, message):
    with pytest.raises(SnapshotError, match=message):
        Snapshot.open(big).lookup(users, items, 0)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.uint64, np.int64])
def test_any_integer_type_and_strided_arrays_work(big, kind):
    users = np.array([7, 0, 9, 0], kind)[::2]
    assert Snapshot.open(big).lookup(users, pa.array([3, 4]), 0).embedding.tolist() == [[7, 3], [9, 4]]


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
def test_no_lookup_compiles_anything_after_the_open(big):
    snapshot = Snapshot.open(big, engine="numba")
    from solaris_udf.snapshot.compiled import _answer

    known = len(_answer.signatures)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    for users in (frozen, pa.array([1, 2, 3, 4, 5]), [1] * 5, np.arange(10)[::2], np.arange(5, dtype=np.uint8)):
        for times in (0, np.zeros(5, np.int64), np.broadcast_to(np.int64(0), 5)):
            for slots in (True, False):
                assert len(snapshot.lookup(users, frozen, times, user_vectors=slots)) == 5
    snapshot.lookup([], [])
    snapshot.lookup(np.zeros(20_000, np.int64), np.zeros(20_000, np.int64))
    assert len(_answer.signatures) == known


def test_an_unknown_engine_is_a_clear_error(big):
    with pytest.raises(SnapshotError, match="engine is 'c'"):
        Snapshot.open(big, engine="c")


def test_a_reader_of_some_shards_refuses_other_users_and_skips_their_pairs(tmp_path):
    shard = {user: user_hash(user) % 2**32 % 2 for user in range(20)}
    here = next(user for user in shard if shard[user] == 0)
    there = next(user for user in shard if shard[user] == 1)
    near = next(user for user in shard if shard[user] == 0 and user != here)
    pairs = {(there, 5): ((1.0, 1.0), 0), (near, 5): ((2.0, 2.0), 0)}
    publish_snapshot(tmp_path, pairs, {here: borrowed((3.0, 3.0), 0, 0.9, [(there, 0.9), (near, 0.8)])})
    assert Snapshot.open(tmp_path).lookup([here], [5], 0).embedding.tolist() == [[1, 1]]
    half = Snapshot.open(tmp_path, shards=[0])
    assert half.lookup([here], [5], 0).embedding.tolist() == [[2, 2]]
    assert half.shard_of([here, there]).tolist() == [0, 1]
    with pytest.raises(SnapshotError, match=r"1 keys are of shards \[1\]"):
        half.lookup([here, there], [5, 5], 0)
    with pytest.raises(SnapshotError, match="there is no shard 2"):
        Snapshot.open(tmp_path, shards=[2])


def test_int8_vectors_are_what_the_codec_says(tmp_path):
    publish_snapshot(tmp_path, {(1, 1): ((1.0, -0.5), 0)}, codec="int8")
    answer = Snapshot.open(tmp_path).lookup([1, 2], [1, 1], 0)
    np.testing.assert_allclose(answer.embedding, [[1, -0.5], [0, 0]], atol=1 / 254)
    assert answer.embedding[0, 0] == np.float32(127) * np.float32(np.float32(1) / 127)


def test_the_files_do_not_depend_on_how_the_input_was_cut(tmp_path):
    pairs = {(user, item): ((1.0, float(item % 7)), item % 9) for user in IDS for item in IDS}
    users = {1: own((1, 2), 3, [(2, 0.5)])}
    ids = {
        write_snapshot(tmp_path, pairs, users, split=split, staging=f".s{split}").snapshot_id for split in (1, 3, None)
    }
    assert len(ids) == 1


def test_the_feature_block_has_a_slot_for_pairs_and_one_for_users(tmp_path):
    publish_snapshot(tmp_path, {(1, 1): ((1.0, 2.0), 0)}, {1: own((3.0, 4.0), 0), 2: borrowed((5.0, 6.0), 0, 0.5)})
    answer = Snapshot.open(tmp_path).lookup([1, 1, 2, 3], [1, 2, 1, 1], 2 * HOUR)
    block, names = feature_block(answer), feature_names(2)
    log_age = np.log1p(np.float32(2))
    assert names == [
        "pair_0",
        "pair_1",
        "pair_present",
        "pair_is_pair",
        "pair_is_neighbor_pair",
        "pair_log_age",
        "pair_similarity",
        "user_0",
        "user_1",
        "user_present",
        "user_is_user_mean",
        "user_is_neighbor_mean",
        "user_is_cold",
        "user_log_age",
        "user_similarity",
    ]
    np.testing.assert_allclose(
        block,
        [
            [1, 2, 1, 1, 0, log_age, 1, 3, 4, 1, 1, 0, 0, log_age, 1],
            [0, 0, 0, 0, 0, 0, 0, 3, 4, 1, 1, 0, 0, log_age, 1],
            [0, 0, 0, 0, 0, 0, 0, 5, 6, 1, 0, 1, 0, log_age, 0.5],
            [0] * 15,
        ],
        rtol=1e-6,
    )
    assert block.dtype == np.float32
    one = feature_block(answer, "one")
    assert one.shape == (4, len(feature_names(2, "one")))
    np.testing.assert_allclose(one[1], [3, 4, 1, 0, 0, 1, 0, 0, log_age, 1], rtol=1e-6)
    with pytest.raises(ValueError, match="user_vectors"):
        feature_block(Snapshot.open(tmp_path).lookup([1], [1], 0, user_vectors=False))


def test_the_policy_of_the_manifest_rules(tmp_path):
    policy = TierPolicy(("user_mean", "pair"), POLICY.ttl_micros, POLICY.max_user_age_micros, 0.0)
    pairs = {(1, 1): ((1.0, 2.0), 0), (2, 1): ((7.0, 8.0), 0)}
    publish_snapshot(tmp_path, pairs, {1: own((3.0, 4.0), 0)}, policy=policy)
    assert Snapshot.open(tmp_path).lookup([1, 2], [1, 1], 0).embedding.tolist() == [[3, 4], [7, 8]]
