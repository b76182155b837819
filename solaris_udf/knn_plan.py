"""How a neighbour search is cut: sizes as pure functions of n and d, centroids, probes and groups of cells."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solaris_udf.knn import Float32, Int64, similarities, unit_vectors

BROADCAST_BYTES = 128 << 20  # vectors of an exact search travel to every worker
TRAIN_BYTES = 64 << 20  # k-means runs in the driver on at most this much
TRAIN_ROWS_PER_CELL = 64  # faiss warns below 39 and gains nothing above 256
MAX_CELLS = 16_384  # 1 for each square root of n up to 268M users
GROUP_BYTES = 16 << 20  # base vectors that one task holds
GROUP_ROWS = 65_536
KMEANS_ROUNDS = 10


@dataclass(frozen=True)
class Plan:
    """Sizes of one search."""

    exact: bool  # everything against everything; no cells are probed
    cells: int  # k-means centroids asked for; also the clusters that users are told
    train_rows: int  # rows that k-means sees, at most
    group_rows: int  # base vectors a task holds, about


def plan(n: int, dim: int, exact_below: int) -> Plan:
    """The sizes for n vectors of dim float32 values.

    Cells: the square root of n, so that finding a cell and searching it cost the same order; at most MAX_CELLS.
    Exact where n <= exact_below and the vectors fit BROADCAST_BYTES. Training rows and group rows are bounded in bytes,
    so they shrink with dim.
    """
    row_bytes = 4 * max(1, dim)
    cells = int(min(MAX_CELLS, max(1, round(float(np.sqrt(n))))))
    return Plan(
        exact=n <= exact_below and n * row_bytes <= BROADCAST_BYTES,
        cells=cells,
        train_rows=int(min(n, TRAIN_ROWS_PER_CELL * cells, max(cells, TRAIN_BYTES // row_bytes))),
        group_rows=int(max(1, min(GROUP_ROWS, GROUP_BYTES // row_bytes))),
    )


def train_centroids(sample: Float32, cells: int, seed: int) -> Float32:
    """Spherical k-means: at most `cells` distinct unit centroids [c, d] for a sample [s, d] of unit vectors, no zeros.

    One thread, so that the same sample gives the same centroids on any number of cores. Fewer distinct vectors than
    cells: each is its own centroid.
    """
    import faiss

    distinct = np.unique(sample, axis=0)
    if len(distinct) <= cells:
        return distinct
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        kmeans = faiss.Kmeans(
            sample.shape[1],
            cells,
            niter=KMEANS_ROUNDS,
            seed=seed,
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(sample),
            verbose=False,
        )
        kmeans.train(np.ascontiguousarray(sample, dtype=np.float32))
    finally:
        faiss.omp_set_num_threads(threads)
    units, finite, zero = unit_vectors(np.asarray(kmeans.centroids))
    if not (finite & ~zero).any():  # the means of opposite vectors vanish
        return distinct[:cells]
    return np.unique(units[finite & ~zero], axis=0)


@dataclass(frozen=True)
class Groups:
    """Which cells are searched together. A cell larger than a group is spread over several of its own."""

    first: Int64  # [c], first group of each cell
    parts: Int64  # [c], how many groups the cell is spread over, at least 1
    count: int

    def of(self, cells: Int64, user_ids: Int64) -> Int64:
        """The one group [n] that holds each user of those cells."""
        parts = self.parts[cells].astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = user_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed >>= np.uint64(32)
        group: Int64 = self.first[cells] + (mixed % parts).astype(np.int64)
        return group


def group_cells(sizes: Int64, centroids: Float32, group_rows: int, seed: int) -> Groups:
    """Packs cells of those sizes [c] into groups of at most group_rows users, near cells together.

    The nearer the cells of a group, the fewer groups a query has to visit. Groups decide only where work is done, never
    the result.
    """
    first, parts = np.zeros(len(sizes), np.int64), np.ones(len(sizes), np.int64)
    areas = max(1, -(-int(sizes.sum()) // group_rows))
    area_centroids = train_centroids(centroids, areas, seed)
    area = similarities(centroids, area_centroids).argmax(axis=1) if len(centroids) else np.zeros(0, np.int64)
    group, filled = 0, 0
    for cell in np.lexsort((np.arange(len(sizes)), area)):
        size = int(sizes[cell])
        if size > group_rows:
            group += filled > 0
            first[cell], parts[cell] = group, -(-size // group_rows)
            group, filled = group + int(parts[cell]), 0
            continue
        if filled and filled + size > group_rows:
            group, filled = group + 1, 0
        first[cell] = group
        filled += size
    return Groups(first, parts, int(group + (filled > 0)) or 1)


@dataclass(frozen=True)
class Probing:
    """How many nearest cells each query searches, and the recall that this gives on the sample."""

    probes: int
    recall: float


def choose_probes(queries: Float32, centroids: Float32, owner: Int64, cells: Int64, target: float) -> Probing:
    """The fewest probes whose recall on the sample is at least target, with a margin for the sample's size.

    queries [q, d]: the sampled vectors. owner [h], cells [h]: a true neighbour's query (row of queries) and its cell.
    Cells are searched in full, so a true neighbour is found exactly if its cell is probed: recall at p probes is the
    share of true neighbours whose cell is among the p nearest of the query. The margin is 1.64 standard errors
    (one-sided 95%) over queries, as one query's neighbours stand together.
    """
    if len(owner) == 0:
        return Probing(len(centroids), 1.0)  # nothing to measure by: search everything
    place = np.empty(len(owner), dtype=np.int64)
    step = max(1, (1 << 22) // len(centroids))
    order = np.argsort(owner, kind="stable")
    for start in range(0, len(order), step):
        rows = order[start : start + step]
        found = similarities(queries[owner[rows]], centroids)
        own = np.take_along_axis(found, cells[rows][:, None], 1)
        earlier = (found == own) & (np.arange(len(centroids))[None, :] < cells[rows][:, None])
        place[rows] = (found > own).sum(axis=1) + earlier.sum(axis=1)
    total = np.bincount(owner, minlength=len(queries)).astype(np.float64)
    asked = total > 0
    low, high = 1, len(centroids)
    while low < high:
        middle = (low + high) // 2
        mean, error = _recall(place, owner, total, asked, middle)
        if mean - 1.64 * error >= target:
            high = middle
        else:
            low = middle + 1
    return Probing(low, _recall(place, owner, total, asked, low)[0])


def _recall(
    place: Int64, owner: Int64, total: npt.NDArray[np.float64], asked: npt.NDArray[np.bool_], probes: int
) -> tuple[float, float]:
    hits = np.bincount(owner, weights=(place < probes).astype(np.float64), minlength=len(total))
    shares = hits[asked] / total[asked]
    return float(shares.mean()), float(shares.std() / np.sqrt(len(shares)))
