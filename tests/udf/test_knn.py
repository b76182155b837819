import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solaris_udf import knn_search
from solaris_udf.knn import top_k, unit_vectors
from solaris_udf.knn_cells import CellIndex, nearest_cells
from solaris_udf.knn_plan import choose_probes, group_cells, plan, train_centroids
from solaris_udf.knn_rows import single_batch

INT64 = np.iinfo(np.int64)


def brute_force(queries, base, base_ids, k, query_ids=None):
    """[(-similarity, id), ...] of each query: plain Python over every pair, ties by id."""
    product = np.clip((queries.astype(np.float64) @ base.astype(np.float64).T).astype(np.float32), -1, 1)
    lists = []
    for row, similarities in enumerate(product):
        own = None if query_ids is None else query_ids[row]
        every = [(-float(value), int(id_)) for value, id_ in zip(similarities, base_ids, strict=True) if id_ != own]
        lists.append(sorted(every)[:k])
    return lists


def as_lists(hits):
    return [
        list(zip((-hits.similarity[row][:count]).tolist(), hits.ids[row][:count].tolist(), strict=True))
        for row, count in enumerate(hits.counts)
    ]


@st.composite
def stored_users(draw, max_users=60):
    """Vectors on a coarse lattice, so that copies and ties are common, zero ones too, with ids over all of int64."""
    count, dim = draw(st.integers(1, max_users)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    spread = draw(st.sampled_from([1, 2, 100]))
    vectors = generator.integers(-spread, spread + 1, (count, dim)).astype(np.float32)
    any_id = st.integers(int(INT64.min), int(INT64.max))
    ids = draw(st.lists(any_id, min_size=count, max_size=count, unique=True))
    return vectors, np.array(ids, dtype=np.int64)


@st.composite
def users(draw):
    """The same as unit vectors, without zero ones."""
    vectors, ids = draw(stored_users())
    vectors[~vectors.any(axis=1), 0] = 1
    return unit_vectors(vectors)[0], ids


@settings(max_examples=60)
@given(users(), st.integers(1, 12))
def test_top_k_is_brute_force_to_the_tie(drawn, k):
    vectors, ids = drawn
    assert as_lists(top_k(vectors, vectors, ids, k, ids)) == brute_force(vectors, vectors, ids, k, ids)
    assert as_lists(top_k(vectors, vectors, ids, k)) == brute_force(vectors, vectors, ids, k)


@settings(max_examples=30)
@given(stored_users(), st.integers(1, 6), st.integers(1, 8), st.integers(0, 3), st.randoms())
def test_searching_every_cell_in_any_grouping_is_exact(drawn, k, group_rows, bad, random):
    """The stages as Spark runs them, with all cells probed: surveyed, routed, sorted, searched, merged."""
    vectors, ids = drawn
    vectors = vectors.astype("<f2")
    vectors[:bad] = np.nan
    stored = pa.RecordBatch.from_pydict(
        {
            "user_id": ids,
            "embedding_micros": np.arange(len(ids)),
            "embedding": pa.array([row.tobytes() for row in vectors], pa.binary()),
            "codec": ["float16"] * len(ids),
        }
    )
    units, finite, zero = unit_vectors(vectors)
    live = finite & ~zero
    centroids = train_centroids(units[live], 4, seed=1) if live.any() else np.eye(1, vectors.shape[1], dtype=np.float32)
    probes, sample = len(centroids), np.flatnonzero(live)[::3]

    # Two tasks each survey a part.
    parts = [stored.slice(0, len(ids) // 2), stored.slice(len(ids) // 2)]
    said = pa.Table.from_batches(
        batch
        for part in parts
        for batch in knn_search.survey(iter(_cut(part, random)), centroids, 1, units[sample], ids[sample], k)
    ).to_pylist()
    assert sorted(row["user_id"] for row in said if row["reason"]) == sorted(ids[~finite].tolist())
    cells = nearest_cells(units[live], centroids, 1)[:, 0]
    counted = Counter()
    for row in said:
        if row["users"] is not None:
            counted[row["cell"]] += row["users"]
    assert counted == Counter({None: int(zero.sum()), **Counter(cells.tolist())})
    truth = brute_force(units[sample], units[live], ids[live], k, ids[sample])
    home = dict(zip(ids[live].tolist(), cells.tolist(), strict=True))
    for query, expected in enumerate(truth):
        hits = [row for row in said if row["query"] == query]
        assert sorted((-row["similarity"], row["user_id"]) for row in hits)[:k] == expected
        assert all(row["cell"] == home[row["user_id"]] for row in hits)

    groups = group_cells(np.bincount(cells, minlength=probes), centroids, group_rows, seed=1)
    batches = list(knn_search.route(iter(_cut(stored, random)), centroids, groups, probes, found=True))
    if not batches:
        assert not finite.any()
        return
    routed = pa.Table.from_batches(batches)
    assert sorted(routed.filter(pc.invert(routed["is_query"]))["user_id"].to_pylist()) == sorted(ids[live].tolist())
    partial = _searched(routed, groups, k, random)
    found = _merged(partial, k, random)
    expected = dict(
        zip(ids[live].tolist(), brute_force(units[live], units[live], ids[live], k, ids[live]), strict=True)
    )
    assert found == {**expected, **{user: [] for user in ids[zero].tolist()}}

    # The first ones are new: they search among the others and are not found.
    old, new = stored.slice(len(ids) // 2), stored.slice(0, len(ids) // 2)
    is_old = live & (np.arange(len(ids)) >= len(ids) // 2)
    own = [home.get(user, 0) for user in old.column("user_id").to_pylist()]
    placed = knn_search.place(iter([old.append_column("cell", pa.array(own, pa.int32()))]), groups)
    queries = knn_search.route(iter(_cut(new, random)), centroids, groups, probes, found=False)
    sent = [*placed, *queries]
    found = _merged(_searched(pa.Table.from_batches(sent), groups, k, random), k, random) if sent else {}
    asked = np.flatnonzero(live & ~is_old)
    expected = brute_force(units[asked], units[is_old], ids[is_old], k) if is_old.any() else [[]] * len(asked)
    nobody = {user: [] for user in ids[: len(ids) // 2][zero[: len(ids) // 2]].tolist()}
    assert found == {**dict(zip(ids[asked].tolist(), expected, strict=True)), **nobody}


def _searched(routed, groups, k, random):
    """What each group's task finds; a group is empty where nobody was sent to it."""
    out = []
    for group in range(groups.count):
        rows = routed.filter(pc.equal(routed["group"], group)).sort_by("is_query")
        batches = _cut(single_batch(rows), random) if rows.num_rows else []
        out += list(knn_search.search_group(iter(batches), k))
    return out


def _merged(partial, k, random):
    if not partial:
        return {}
    by_user = single_batch(pa.Table.from_batches(partial).sort_by("user_id"))
    return {
        row["user_id"]: [(-hit["similarity"], hit["user_id"]) for hit in row["neighbors"]]
        for batch in knn_search.merge_hits(iter(_cut(by_user, random)), k)
        for row in batch.to_pylist()
    }


def _cut(batch, random):
    """The batch in up to three pieces, an empty one among them."""
    first, second = sorted(random.randint(0, batch.num_rows) for _ in range(2))
    return [batch.slice(0, first), batch.slice(first, second - first), batch.slice(second)]


def _clustered(count, dim, centres, seed):
    generator = np.random.default_rng(seed)
    middle = generator.normal(size=(centres, dim))
    return unit_vectors(middle[generator.integers(0, centres, count)] + 0.4 * generator.normal(size=(count, dim)))[0]


def test_answers_do_not_depend_on_the_batch_or_the_number_of_threads():
    import faiss

    vectors, ids = _clustered(3000, 32, 20, seed=3), np.arange(3000, dtype=np.int64)
    whole = top_k(vectors, vectors, ids, 10, ids)
    before = faiss.omp_get_max_threads()
    try:
        for threads, size in ((1, 7), (2, 1000)):
            faiss.omp_set_num_threads(threads)
            for start in (0, 14, 1000):
                part = slice(start, start + size)
                again = top_k(vectors[part], vectors, ids, 10, ids[part])
                assert np.array_equal(again.ids, whole.ids[part])
                assert np.array_equal(again.similarity, whole.similarity[part])
    finally:
        faiss.omp_set_num_threads(before)


def test_ten_thousand_equal_vectors_find_the_lowest_ids():
    vectors = np.repeat(unit_vectors([[0.3, -0.2, 0.9]])[0], 10_000, axis=0)
    ids = np.arange(10_000, dtype=np.int64) * 3
    hits = top_k(vectors[:5], vectors, ids, 3, ids[:5])
    assert hits.ids.tolist() == [[3, 6, 9], [0, 6, 9], [0, 3, 9], [0, 3, 6], [0, 3, 6]]
    assert hits.similarity == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_fewer_others_than_k_gives_those_there_are(count):
    vectors, ids = _clustered(6, 4, 2, seed=0)[:count], np.arange(6, dtype=np.int64)[:count]
    hits = top_k(vectors.reshape(-1, 4), vectors.reshape(-1, 4), ids, 5, ids)
    assert hits.counts.tolist() == [min(5, count - 1)] * count
    assert as_lists(hits) == brute_force(vectors.reshape(-1, 4), vectors.reshape(-1, 4), ids, 5, ids)


def test_unit_vectors_of_any_size_and_what_is_not_a_direction():
    rows = np.array([[3, 4], [3e38, 4e37], [3e-40, 4e-40], [0, 0], [np.nan, 1], [1, np.inf], [-0.0, 0.0]])
    units, finite, zero = unit_vectors(rows)
    assert units[0] == pytest.approx([0.6, 0.8])
    assert np.linalg.norm(units[1:3], axis=1) == pytest.approx([1, 1], abs=1e-7)
    assert units[2] == pytest.approx([0.6, 0.8])
    assert finite.tolist() == [True, True, True, True, False, False, True]
    assert zero.tolist() == [False, False, False, True, False, False, True]
    assert not units[3:].any()
    assert np.array_equal(np.rint(units * 2.0**26) / 2.0**26, units)


def test_the_plan_is_a_pure_function_with_bounds():
    assert plan(0, 64, 20_000).exact and plan(20_000, 64, 20_000).exact and not plan(20_001, 64, 20_000).exact
    assert not plan(20_000, 4096, 20_000).exact  # 328 MB would travel to every worker
    assert (plan(10_000, 64, 0).cells, plan(1_000_000, 64, 0).cells, plan(10**12, 64, 0).cells) == (100, 1000, 16_384)
    for dim in (1, 64, 1024, 16_384):
        for n in (1, 39, 40_000, 10**6, 10**9):
            rule = plan(n, dim, 0)
            assert 1 <= rule.cells <= n and rule.train_rows <= n
            assert rule.train_rows * dim * 4 <= max(64 << 20, rule.cells * dim * 4)
            assert rule.group_rows * dim * 4 <= 16 << 20 or rule.group_rows == 1


def test_centroids_of_fewer_points_than_cells_are_the_points():
    points = unit_vectors(np.array([[1, 0], [0, 1], [1, 0]], dtype=np.float32))[0]
    assert train_centroids(points, 50, seed=1).tolist() == [[0, 1], [1, 0]]
    assert train_centroids(np.zeros((0, 2), np.float32), 50, seed=1).shape == (0, 2)
    many = _clustered(500, 8, 10, seed=5)
    assert np.array_equal(train_centroids(many, 20, seed=1), train_centroids(many, 20, seed=1))
    assert len(train_centroids(many, 20, seed=1)) == 20


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_centroids_do_not_depend_on_the_number_of_threads(threads):
    import faiss

    many = _clustered(3000, 32, 20, seed=6)  # enough for a parallel k-means to differ in its last bits
    before = faiss.omp_get_max_threads()
    expected = train_centroids(many, 55, seed=1)
    faiss.omp_set_num_threads(threads)
    try:
        assert train_centroids(many, 55, seed=1).tobytes() == expected.tobytes()
        assert faiss.omp_get_max_threads() == threads
    finally:
        faiss.omp_set_num_threads(before)


def test_groups_are_bounded_and_a_giant_cell_is_spread():
    centroids = _clustered(6, 4, 6, seed=2)
    sizes = np.array([10, 250, 40, 0, 60, 30])
    groups = group_cells(sizes, centroids, group_rows=100, seed=1)
    assert groups.parts.tolist() == [1, 3, 1, 1, 1, 1]
    cells = np.repeat(np.arange(6), sizes)
    group = groups.of(cells, np.arange(len(cells), dtype=np.int64) - 200)
    giant = np.unique(group[cells == 1])
    assert len(giant) == 3 and not set(giant) & set(group[cells != 1])
    loads = np.bincount(group, minlength=groups.count)
    assert loads[np.setdiff1d(np.arange(groups.count), giant)].max() <= 100
    assert loads[giant].max() <= 120 and loads.sum() == 390 and groups.count == len(loads)


def test_probes_reach_the_recall_they_promise():
    vectors, ids = _clustered(4000, 16, 40, seed=7), np.arange(4000, dtype=np.int64)
    centroids = train_centroids(vectors, 63, seed=1)
    cells = nearest_cells(vectors, centroids, 1)[:, 0]
    truth = top_k(vectors, vectors, ids, 10, ids)
    sample = np.arange(0, 4000, 8)
    owner = np.repeat(np.arange(len(sample)), 10)
    probing = choose_probes(vectors[sample], centroids, owner, cells[truth.ids[sample].ravel()], 0.95)
    index = CellIndex(ids, vectors, cells)
    probed = nearest_cells(vectors, centroids, probing.probes)
    hits = index.search(vectors, ids, np.full(len(ids), probing.probes), probed.ravel(), 10)
    recalls = np.array([len(set(a) & set(b)) / 10 for a, b in zip(hits.ids.tolist(), truth.ids.tolist(), strict=True)])
    assert recalls.mean() >= 0.95
    assert recalls[sample].mean() == pytest.approx(probing.recall)  # what was measured is what the search gives
    assert 1 < probing.probes < len(centroids)
    assert choose_probes(vectors[sample], centroids, owner, cells[truth.ids[sample].ravel()], 1.0).recall == 1.0


@pytest.mark.parametrize("order", ["import faiss, torch", "import torch, faiss"])
def test_faiss_and_torch_live_in_one_process_in_either_order(order):
    program = f"""
{order}
import numpy as np
x = np.eye(300, 16, dtype=np.float32) + 1
for _ in range(3):
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64)).sum()
    faiss.knn(x, x, 3, metric=faiss.METRIC_INNER_PRODUCT)
    faiss.Kmeans(16, 4, niter=2, seed=1).train(x)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip().endswith("done")) == (0, True), result.stderr
