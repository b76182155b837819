from datetime import timedelta

import numpy as np
import pytest

from jobs import find_neighbors
from jobs.common.clock import parse_as_of
from jobs.common.errors import UserError
from jobs.common.log import latest_build
from solaris_udf.codec import decode, encode
from tests.conftest import AS_OF, IN_ZONES, hours, log_row

LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def embedding(user, vector, **more):
    return {"user_id": user, "embedding": encode([vector])[0].as_py(), "newest_at": AS_OF - hours(48), **more}


def saved(tables, as_of=AS_OF):
    rows = tables.read_slice("user_neighbors", as_of).collect()
    assert len({row.user_id for row in rows}) == len(rows)
    return {row.user_id: row for row in rows}


def lists(rows):
    return {user: [(hit.user_id, hit.similarity) for hit in row.neighbors] for user, row in rows.items()}


def brute_force(vectors, k):
    """{user: [(user, cosine), ...]} over every pair, most similar first, ties by id."""
    units = {user: np.asarray(v, np.float64) / np.linalg.norm(np.asarray(v, np.float64)) for user, v in vectors.items()}
    return {
        user: sorted(
            ((other, float(unit @ there)) for other, there in units.items() if other != user),
            key=lambda hit: (-round(hit[1], 6), hit[0]),
        )[:k]
        for user, unit in units.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for user, hits in expected.items():
        assert [other for other, _ in found[user]] == [other for other, _ in hits], user
        assert [value for _, value in found[user]] == pytest.approx([value for _, value in hits], abs=1e-6)


def test_every_seen_user_has_the_nearest_of_their_latest_embedding(make_run, tables, fill):
    seen = [1, 2, 3, LARGEST, SMALLEST, 50, 60, 70]
    fill(
        "ranking_log",
        [log_row(user, 1, AS_OF - hours(5)) for user in seen]
        + [
            log_row(80, 1, AS_OF - hours(7 * 24)),  # at the start of the 7 days: seen
            log_row(81, 1, AS_OF - hours(7 * 24 + 1)),  # before: not
        ],
    )
    fill("user_embeddings", [embedding(1, [-1, 0]), embedding(2, [1, 1]), embedding(81, [1, 0])], AS_OF - hours(30))
    fill(
        "user_embeddings",
        [
            embedding(1, [1, 0]),
            embedding(3, [0, 1]),
            embedding(LARGEST, [2, 2]),
            embedding(SMALLEST, [1, -1]),
            embedding(50, [0, 0]),
            embedding(60, [0, 0], embedding=np.array([1, np.nan], "<f2").tobytes()),
            embedding(80, [3, 0]),
            embedding(99, [1, 0]),
        ],
    )
    fill("user_embeddings", [embedding(1, [0, -1])], AS_OF + hours(6))  # the future

    report = find_neighbors.run(*make_run("find_neighbors", AS_OF, "serving.neighbors=3"))
    rows = saved(tables)
    vectors = {1: [1, 0], 2: [1, 1], 3: [0, 1], LARGEST: [1, 1], SMALLEST: [1, -1], 80: [1, 0]}
    expected = {**brute_force(vectors, 3), 50: []}
    assert [user for user, _ in expected[2]] == [LARGEST, 1, 3]  # by hand: 1, then a three-way tie by id
    assert_same(lists(rows), expected)
    assert rows[2].embedding_at == (AS_OF - hours(30)).replace(tzinfo=None)
    assert rows[1].embedding_at == AS_OF.replace(tzinfo=None)
    assert {row.model_version for row in rows.values()} == {"m1"}
    assert rows[1].cluster_id == rows[80].cluster_id and rows[2].cluster_id == rows[LARGEST].cluster_id
    assert (report.rows_in, report.rows_out, report.rows_rejected) == (8, 7, 1)
    assert (report.metrics["zero_vectors"], report.metrics["users"], report.metrics["recall"]) == (1, 7, 1.0)
    refused = tables.read("rejected_rows").collect()
    assert [row.reason for row in refused] == ["the user embedding has a NaN or an Inf"]
    assert '"user_id":60' in refused[0].row

    # The same users through cells, all of them probed: the same lists. The zero vector still has a row.
    overrides = ("serving.neighbors=3", "find_neighbors.exact_below=0", "find_neighbors.recall_target=1")
    report = find_neighbors.run(*make_run("find_neighbors", AS_OF, *overrides))
    assert report.metrics["exact"] == 0.0
    assert lists(saved(tables)) == lists(rows)

    # Nobody known yet: an empty slice.
    early = AS_OF - hours(72)
    report = find_neighbors.run(*make_run("find_neighbors", early))
    assert (report.rows_out, saved(tables, early)) == (0, {})


@IN_ZONES
def test_users_are_those_of_whole_days_of_24_hours_on_any_day_in_any_zone(make_run, tables, fill, zone, as_of):
    at, second = parse_as_of(as_of), timedelta(seconds=1)
    seen = {1: at - hours(48), 2: at - second, 3: at - hours(48) - second, 4: at}
    fill("ranking_log", [log_row(user, 1, moment) for user, moment in seen.items() if moment < at], at)
    fill("ranking_log", [log_row(4, 1, at)], at + hours(6))
    fill("user_embeddings", [embedding(user, [1, user], newest_at=at) for user in seen], at)
    find_neighbors.run(*make_run("find_neighbors", at, "find_neighbors.days=2"))
    assert set(saved(tables, at)) == {1, 2}


def test_cells_reach_the_target_and_do_not_depend_on_partitions(make_run, tables, fill, spark, monkeypatch):
    generator = np.random.default_rng(4)
    centres = generator.normal(size=(30, 12))
    vectors = centres[generator.integers(0, 30, 1500)] + 0.3 * generator.normal(size=(1500, 12))
    ids = generator.permutation(np.arange(1500)) * 1_000_003 - 7
    fill("ranking_log", [log_row(int(user), 1, AS_OF - hours(5)) for user in ids])
    fill("user_embeddings", [embedding(int(user), vector) for user, vector in zip(ids, vectors, strict=True)])
    stored = dict(zip(ids.tolist(), decode(encode(vectors)), strict=True))
    truth = brute_force(stored, 10)

    monkeypatch.setattr("solaris_udf.knn_plan.GROUP_ROWS", 100)  # several groups, giant cells spread over some of them
    overrides = ("find_neighbors.exact_below=0", "find_neighbors.recall_target=0.9")
    report = find_neighbors.run(*make_run("find_neighbors", AS_OF, *overrides))
    found = lists(saved(tables))
    assert found.keys() == truth.keys()
    overlap = []
    for user, hits in found.items():
        others = [other for other, _ in hits]
        assert len(others) == len(set(others)) == 10 and user not in others
        assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))
        overlap.append(len(set(others) & {other for other, _ in truth[user]}) / 10)
    assert np.mean(overlap) >= 0.9 and report.metrics["recall"] >= 0.9
    # 1,000 of 1,500 users were measured: their recall is close to everyone's.
    assert report.metrics["recall"] == pytest.approx(np.mean(overlap), abs=0.02)
    assert report.metrics["groups"] >= 15 and 1 <= report.metrics["probes"] < report.metrics["cells"] <= 39

    rows = {user: (row.cluster_id, row.neighbors) for user, row in saved(tables).items()}
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "5")
    monkeypatch.setattr("solaris_udf.knn_plan.GROUP_ROWS", 700)
    try:
        report = find_neighbors.run(*make_run("find_neighbors", AS_OF, *overrides))
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert report.metrics["groups"] < 5
    assert {user: (row.cluster_id, row.neighbors) for user, row in saved(tables).items()} == rows


def test_new_users_are_searched_for_in_the_last_build_until_the_next_one(make_run, tables, fill, spark, monkeypatch):
    generator = np.random.default_rng(8)
    centres = generator.normal(size=(12, 8))
    vectors = centres[generator.integers(0, 12, 430)] + 0.3 * generator.normal(size=(430, 8))
    old, new = range(400), range(400, 430)
    stored = dict(zip(range(430), decode(encode(vectors)), strict=True))
    later = AS_OF + hours(6)
    fill("ranking_log", [log_row(user, 1, AS_OF - hours(5)) for user in range(430)])
    fill("user_embeddings", [embedding(user, vectors[user]) for user in old])
    fill(
        "user_embeddings",
        [
            *(embedding(user, vectors[user]) for user in new),
            embedding(5, [9] * 8),  # known before: not searched for again, and found by their vector of the build
            embedding(900, [1] * 8),  # never seen
        ],
        later,
    )
    # A build that compared every pair is searched in full, here in several groups.
    monkeypatch.setattr("solaris_udf.knn_plan.GROUP_ROWS", 100)
    overrides = ("serving.neighbors=4",)
    report = find_neighbors.run(*make_run("find_neighbors", AS_OF, *overrides))
    assert (report.rows_out, report.metrics["full"]) == (400, 1.0)
    build = lists(saved(tables))
    properties = spark.sql(f"SHOW TBLPROPERTIES delta.`{tables.path('user_neighbors')}`").collect()
    said = {row.key: row.value for row in properties if row.key.startswith("solaris.")}
    assert said["solaris.build"] == "20260103T000000Z" and said["solaris.recall"] == "1.0"
    assert (said["solaris.users"], said["solaris.exact"]) == ("400", "1.0")

    for _ in range(2):  # a retry does the same again
        report = find_neighbors.run(*make_run("find_neighbors", later, *overrides))
        assert (report.rows_out, report.metrics["full"]) == (30, 0.0)
    found = saved(tables, later)
    truth = brute_force(stored, 430)
    assert_same(lists(found), {user: [hit for hit in truth[user] if hit[0] < 400][:4] for user in new})
    assert {row.build for row in found.values()} == {"20260103T000000Z"}
    together = latest_build(tables.read("user_neighbors")).collect()
    assert lists({row.user_id: row for row in together}) == {**build, **lists(found)}
    # A new user is in the cluster of the most similar centroid.
    rows = tables.read_slice("user_clusters", AS_OF).orderBy("cluster_id").collect()
    centroids = np.array([np.frombuffer(row.centroid, "<f4") for row in rows])
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(1, abs=1e-6)
    assert [row.cluster_id for row in rows] == list(range(len(rows))) and 10 < len(rows) <= 20
    for user, row in found.items():
        assert row.cluster_id == int(np.argmax(centroids @ stored[user]))

    # Nobody new: an empty slice. A day after the build: everybody again.
    assert find_neighbors.run(*make_run("find_neighbors", AS_OF + hours(7), *overrides)).rows_out == 0
    report = find_neighbors.run(*make_run("find_neighbors", AS_OF + hours(24), *overrides))
    assert (report.rows_out, report.metrics["full"]) == (430, 1.0)
    assert latest_build(tables.read("user_neighbors")).select("build").distinct().count() == 1


@pytest.mark.parametrize(("users", "below"), [(1, 0), (4, 0), (3, 20_000)])  # k = 3
def test_few_or_equal_users_have_each_other(make_run, tables, fill, users, below):
    fill("ranking_log", [log_row(user, 1, AS_OF - hours(5)) for user in range(users)])
    fill("user_embeddings", [embedding(user, [2, 1]) for user in range(users)])
    overrides = ("serving.neighbors=3", f"find_neighbors.exact_below={below}")
    assert find_neighbors.run(*make_run("find_neighbors", AS_OF, *overrides)).rows_out == users
    everyone = range(users)
    assert lists(saved(tables)) == {
        user: [(other, 1.0) for other in everyone if other != user][:3] for user in everyone
    }


def test_versions_do_not_mix(make_run, tables, fill):
    fill("ranking_log", [log_row(user, 1, AS_OF - hours(5)) for user in (1, 2)])
    fill("user_embeddings", [embedding(1, [1, 0]), embedding(2, [1, 1], model_version="m2")])
    with pytest.raises(UserError, match="several model versions \\(m1, m2\\)"):
        find_neighbors.run(*make_run("find_neighbors"))
    assert not tables.exists("user_neighbors")
