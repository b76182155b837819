from datetime import timedelta

import numpy as np
import pytest

from jobs.common import snapshot_users, snapshots
from jobs.common.clock import micros
from jobs.common.errors import RunFailed, UserError
from jobs.export_snapshot import choose_shards, find_source, run, shard_rows
from solaris_udf.codec import encode
from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.hashing import hash_pairs, hash_users, shard_of
from tests.conftest import AS_OF, hours, log_row

LOW, HIGH = -(2**63), 2**63 - 1


def packed(*values, codec="float16"):
    return encode([values], codec)[0].as_py()


def pair(user, item, *values, **more):
    return {"user_id": user, "item_id": item, "embedding": packed(*values), **more}


def mean(user, newest_at, *values):
    return {"user_id": user, "embedding": packed(*values), "newest_at": newest_at}


def near(user, *neighbors):
    return {"user_id": user, "neighbors": list(neighbors), "embedding_at": AS_OF - hours(24)}


def fill_world(fill):
    """User 1 has pairs and a mean; 2 and 3 only neighbours; 5 an old mean; 6 an expired one; LOW and HIGH extremes."""
    fill(
        "pair_embeddings",
        [
            pair(1, 10, 1, 2),
            pair(LOW, HIGH, 3, 4),
            pair(HIGH, LOW, -5, 6),
            pair(1, 20, 9, 9, model_version="m0"),
        ],
        AS_OF,
    )
    fill("pair_embeddings", [pair(1, 10, 7, 7), pair(1, 11, 0.5, 0.25), pair(HIGH, 11, 8, 8)], AS_OF - hours(6))
    fill("pair_embeddings", [pair(1, 12, 6, 6)], AS_OF - hours(24))
    fill("user_embeddings", [mean(1, AS_OF, 1, 1), mean(HIGH, AS_OF - hours(6), 2, 2)], AS_OF)
    fill(
        "user_embeddings",
        [
            mean(1, AS_OF - hours(24), 9, 9),
            mean(5, AS_OF - hours(47), 5, 5),
            mean(6, AS_OF - hours(48), 6, 6),
        ],
        AS_OF - hours(24),
    )
    fill(
        "user_neighbors",
        [
            near(2, (1, 0.9)),
            near(3, (9, 0.99), (HIGH, 0.75), (5, 0.5), (1, 0.25)),
            near(1, (HIGH, 0.8)),
            near(7, (9, 0.9)),
            near(8, (5, -0.5)),
        ],
        AS_OF - hours(24),
    )


@pytest.mark.spark
def test_each_tier_of_an_export_answers_with_the_tables_vectors(spark, fill, make_run, root):
    fill_world(fill)
    folder = root / "snapshots"
    at = micros(AS_OF + timedelta(seconds=600))
    job, settings = make_run("export_snapshot", AS_OF, "export_snapshot.shards=3", "export_snapshot.neighbors=2")
    # Two model versions and no model to choose between them.
    with pytest.raises(UserError, match=r"m0, m1"):
        run(job, settings)
    assert not folder.exists()
    fill("pair_embeddings", [pair(1, 10, 1, 2), pair(LOW, HIGH, 3, 4), pair(HIGH, LOW, -5, 6)], AS_OF)

    spark.conf.set("spark.sql.shuffle.partitions", "1")
    report = run(job, settings)
    assert {name: report.metrics[name] for name in ("pairs", "users_own", "users_neighbor", "shards", "live")} == {
        "pairs": 5,
        "users_own": 3,
        "users_neighbor": 2,
        "shards": 3,
        "live": 1,
    }
    snapshot = Snapshot.open(folder, verify="full")
    keys = [
        (1, 10, "pair", (1, 2), 600, 1.0, "user_mean", (1, 1)),  # the later of two vectors
        (1, 11, "pair", (0.5, 0.25), 6 * 3600 + 600, 1.0, "user_mean", (1, 1)),
        (1, 12, "user_mean", (1, 1), 600, 1.0, "user_mean", (1, 1)),  # exactly the TTL old: not exported
        (LOW, HIGH, "pair", (3, 4), 600, 1.0, "none", (0, 0)),
        (HIGH, LOW, "pair", (-5, 6), 600, 1.0, "user_mean", (2, 2)),
        (HIGH, 99, "user_mean", (2, 2), 6 * 3600 + 600, 1.0, "user_mean", (2, 2)),
        (2, 10, "neighbor_pair", (1, 2), 600, 0.9, "neighbor_mean", (1, 1)),
        (2, 99, "neighbor_mean", (1, 1), 600, 0.9, "neighbor_mean", (1, 1)),
        (3, 11, "neighbor_pair", (8, 8), 6 * 3600 + 600, 0.75, "neighbor_mean", (2, 2)),  # 9 has no mean: HIGH is best
        (3, 10, "neighbor_mean", (2, 2), 6 * 3600 + 600, 0.75, "neighbor_mean", (2, 2)),  # 1 is its third: not kept
        (5, 10, "user_mean", (5, 5), 47 * 3600 + 600, 1.0, "user_mean", (5, 5)),
        (6, 10, "none", (0, 0), -1, 0.0, "none", (0, 0)),
        (7, 10, "none", (0, 0), -1, 0.0, "none", (0, 0)),  # its only neighbour has no mean
        (8, 10, "none", (0, 0), -1, 0.0, "none", (0, 0)),  # its only neighbour is less similar than min_similarity
    ]
    answer = snapshot.lookup([key[0] for key in keys], [key[1] for key in keys], at)
    assert answer.tier_names == [key[2] for key in keys]
    np.testing.assert_array_equal(answer.embedding, np.array([key[3] for key in keys], np.float32))
    assert answer.age_seconds.tolist() == [key[4] for key in keys]
    np.testing.assert_array_equal(answer.similarity, np.array([key[5] for key in keys], np.float32))
    assert [snapshots.inspect(folder)["snapshot_id"]] == [snapshot.snapshot_id]
    np.testing.assert_array_equal(answer.user_embedding, np.array([key[7] for key in keys], np.float32))

    row = job.tables.read("snapshots").collect()[0]
    assert (row.snapshot_id, row.live_from, row.status, row.pairs, row.users_own, row.users_neighbor) == (
        snapshot.snapshot_id,
        (AS_OF + hours(1 / 6)).replace(tzinfo=None),
        "live",
        5,
        3,
        2,
    )

    # The same slice again, from other partitions: the same bytes, so the same id and no second folder.
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.arrow")}
    spark.conf.set("spark.sql.shuffle.partitions", "4")
    try:
        run(job, settings)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.arrow")} == before
    assert sorted(path.name for path in folder.iterdir()) == [".publish.lock", snapshot.snapshot_id, "CURRENT"]

    # Bad vectors, and a slice without fresh pairs, leave CURRENT alone and nothing behind.
    fill(
        "pair_embeddings",
        [
            {"user_id": 1, "item_id": 1, "embedding": packed(1, 2, 3)},
            {"user_id": 1, "item_id": 2, "embedding": np.array([np.nan, 1], "<f2").tobytes()},
        ],
        AS_OF + hours(18),
    )
    for hours_later, message in ((18, "stored vectors are bad|differ in dimensions"), (17.5, "there is no fresh pair")):
        late_job, late_settings = make_run("export_snapshot", AS_OF + hours(hours_later), "serving.ttl_hours=6")
        with pytest.raises(RunFailed, match=message):
            run(late_job, late_settings)
    assert Snapshot.open(folder).snapshot_id == snapshot.snapshot_id
    assert sorted(path.name for path in folder.iterdir()) == [".publish.lock", snapshot.snapshot_id, "CURRENT"]


@pytest.mark.spark
def test_the_cold_tier_is_the_centroid_of_the_users_group(spark, fill, make_run, root, monkeypatch):
    fill_world(fill)
    fill("pair_embeddings", [pair(1, 10, 1, 2)], AS_OF)

    def seen(user, group, ago, **more):
        return log_row(user, 10, AS_OF - hours(ago), user_group=group, **more)

    rows = [seen(1, "a", 3), seen(HIGH, "a", 3), seen(5, "b", 3), seen(2, "b", 3)]  # 2 has a neighbour
    rows += [seen(20, "a", 3), seen(21, "b", 3), seen(22, None, 3), seen(23, "nobody with a mean", 3)]
    rows += [seen(24, "a", 7 * 24 + 1), seen(25, "b", 3), seen(25, "a", 2), seen(26, "a", 1, arrived_at=AS_OF)]
    fill("ranking_log", rows, AS_OF)
    fill("ranking_log", [seen(20, "b", -1), seen(27, "a", -1)], AS_OF + hours(6))  # the future
    tiers = 'serving.tiers=["pair", "user_mean", "neighbor_pair", "neighbor_mean", "cold"]'
    users = [1, 2, 20, 21, 22, 23, 24, 25, 26, 27]

    def export(*settings):
        report = run(*make_run("export_snapshot", AS_OF, *settings))
        answer = Snapshot.open(root / "snapshots").lookup(users, [99] * len(users), micros(AS_OF))
        return report.metrics["users_cold"], answer

    count, answer = export()
    assert (count, answer.tier_names[2:]) == (0, ["none"] * 8)

    count, answer = export(tiers)
    assert answer.tier_names == ["user_mean", "neighbor_mean", *(["cold"] * 2), *(["none"] * 3), "cold", "cold", "none"]
    assert answer.embedding[[2, 3, 7, 8]].tolist() == [[1.5, 1.5], [5, 5], [1.5, 1.5], [1.5, 1.5]]
    assert answer.age_seconds[[2, 3, 7]].tolist() == [0, 47 * 3600, 0]  # that of the group's newest mean
    assert answer.similarity[2] == 0 and answer.user_similarity[2] == 0
    assert count == 4
    info = snapshots.inspect(root / "snapshots")
    assert (info["users_own"], info["users_neighbor"], info["users_cold"]) == (3, 2, 4)
    assert not snapshots.verify(root / "snapshots")

    # Else Spark brings a whole group to one task before it cuts it down.
    assert int(spark.conf.get("spark.sql.optimizer.windowGroupLimitThreshold")) >= snapshot_users.GROUP_SAMPLE
    monkeypatch.setattr(snapshot_users, "GROUP_SAMPLE", 1)
    member = min((1, HIGH), key=lambda user: hash_users(np.array([user])).view(np.int64)[0])
    _, answer = export(tiers)
    assert answer.embedding[2].tolist() == ([1, 1] if member == 1 else [2, 2])


@pytest.mark.spark
def test_spark_and_numpy_agree_on_hash_shard_and_order(spark):
    rng = np.random.default_rng(3)
    users = np.concatenate([[LOW, HIGH, 0, -1, 1, 2**53 + 1], rng.integers(LOW, HIGH, 500)]).astype(np.int64)
    items = np.concatenate([[HIGH, LOW, 0, -1, 2, -(2**53) - 1], rng.integers(LOW, HIGH, 500)]).astype(np.int64)
    ids = list(zip(users.tolist(), items.tolist(), strict=True))
    pairs = spark.createDataFrame(ids, "user_id BIGINT, item_id BIGINT")
    pairs = pairs.selectExpr("*", "X'0000' AS embedding", "'float16' AS codec", "timestamp_micros(7) AS as_of")
    no_users = spark.createDataFrame(
        [],
        (
            "user_id BIGINT, embedding BINARY, codec STRING, computed_at BIGINT, tier TINYINT, source_user BIGINT, "
            "similarity FLOAT, neighbors ARRAY<STRUCT<user_id: BIGINT, similarity: FLOAT>>"
        ),
    )
    rows = shard_rows(pairs, no_users, 5).toArrow()
    found = list(zip(*(rows.column(name).to_pylist() for name in ("shard", "user_id", "item_id")), strict=True))
    hashes = hash_pairs(hash_users(users), items)
    shard = shard_of(hash_users(users), 5)
    order = np.lexsort((items, users, hashes, shard))
    assert found == list(zip(shard[order].tolist(), users[order].tolist(), items[order].tolist(), strict=True))
    assert set(rows.column("computed_at").to_pylist()) == {7}


@pytest.mark.spark
def test_nothing_to_export_is_the_users_to_fix(make_run):
    job, _ = make_run("export_snapshot")
    with pytest.raises(UserError, match="nothing to export"):
        find_source(job)


@pytest.mark.parametrize(
    ("rows", "setting", "shards"),
    [(0, 0, 2), (1_999_999, 0, 2), (2_000_001, 0, 3), (5_000_000, 0, 5), (10**12, 0, 4096), (0, 7, 7)],
)
def test_shards_follow_the_rows_within_bounds(rows, setting, shards):
    assert choose_shards(rows, setting) == shards
