"""Neighbour searches as DataFrames: every pair, through cells, and of new users through the cells of a past build.

Input: STORED_DDL rows, the latest embedding of each user. What runs in a task is in solaris_udf/knn_search.py.
"""

from dataclasses import dataclass

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from solaris_udf import knn_search as stages
from solaris_udf.knn import Float32, Int64
from solaris_udf.knn_plan import Groups, Plan, Probing, choose_probes, group_cells, plan, train_centroids
from solaris_udf.knn_rows import single_batch, units_of


@dataclass(frozen=True)
class Cells:
    """What a later search among the same users needs: the centroids [c, d], and how many a query probes."""

    centroids: Float32
    probes: int


@dataclass(frozen=True)
class Search:
    """Neighbours that are found when `found` is written, and what is known before."""

    found: DataFrame  # FOUND_DDL, a row for each user with a finite vector
    cells: Cells
    refused: DataFrame  # user_id, embedding_micros, reason
    rejected: int
    zero: int
    figures: dict[str, float]
    held: tuple[DataFrame, ...] = ()  # persisted frames, to be released when `found` was written


@dataclass(frozen=True)
class Sampling:
    """How the probes are chosen."""

    recall_target: float
    recall_sample: int
    seed: int


def search_all_pairs(known: DataFrame, rule: Plan, k: int, seed: int) -> Search:
    """Compares every pair. The vectors, bounded by the plan, travel to the workers by broadcast."""
    # Ordered, so that the broadcast is the same whatever the partitions were.
    ids, units, finite, zero = units_of(single_batch(known.toArrow().sort_by("user_id")))
    live = finite & ~zero
    base = units[live]
    centroids = train_centroids(_spread(base, rule.train_rows), rule.cells, seed)
    shared = known.sparkSession.sparkContext.broadcast((base, ids[live], centroids))
    found = known.mapInArrow(lambda batches: stages.search_exactly(batches, *shared.value, k), stages.FOUND_DDL)
    figures = {"exact": 1.0, "cells": 1.0, "probes": 1.0, "recall": 1.0, "groups": 1.0}
    refused = known.where(F.col("user_id").isin(ids[~finite].tolist())).select(
        "user_id", "embedding_micros", F.lit(stages.NOT_FINITE).alias("reason")
    )
    cells = Cells(centroids, max(1, len(centroids)))
    return Search(found, cells, refused, int((~finite).sum()), int(zero.sum()), figures)


def search_cells(known: DataFrame, users: int, rule: Plan, k: int, sampling: Sampling) -> Search:
    """Probes cells. Two passes over the users: a survey, which measures what the second one, the search, needs.

    The driver sees the k-means sample, the recall sample and one number a cell: all bounded by the plan.
    """
    train, (query_ids, queries) = _samples(known, users, rule.train_rows, sampling)
    centroids = train_centroids(train, rule.cells, sampling.seed)
    if len(centroids) == 0:  # only zero vectors were sampled: one cell, of any direction
        centroids = np.eye(1, queries.shape[1], dtype=np.float32)
    surveyed = _survey(known, centroids, 1, k, queries, query_ids)
    counts, zero, rejected = _counts(surveyed, len(centroids))
    probing = _measured_probes(surveyed, queries, centroids, k, sampling.recall_target)
    groups = group_cells(counts, centroids, rule.group_rows, sampling.seed)
    figures = {
        "exact": 0.0,
        "cells": len(centroids),
        "probes": probing.probes,
        "recall": probing.recall,
        "recall_sample": len(query_ids),
        "groups": groups.count,
        "largest_cell": int(counts.max()),
    }
    cells = Cells(centroids, probing.probes)
    found = _search_groups(_routed(known, cells, groups, found=True), groups, k)
    return Search(found, cells, _refused(surveyed), rejected, zero, figures, (surveyed,))


def search_new(known: DataFrame, base: DataFrame, cells: Cells, k: int, seed: int) -> Search:
    """The nearest of each new user among the users of a build (base: STORED_DDL and cell), by its cells and probes.

    Only the cells that a new user probes are read.
    """
    centroids = cells.centroids
    none = np.zeros((0, centroids.shape[1]), np.float32)
    surveyed = _survey(known, centroids, cells.probes, k, none, np.zeros(0, np.int64))
    probed, zero, rejected = _counts(surveyed, len(centroids))
    asked = base.where(F.col("cell").isin(np.flatnonzero(probed).tolist()))
    rows = asked.groupBy("cell").count().toArrow()
    counts = np.zeros(len(centroids), dtype=np.int64)
    counts[rows.column("cell").to_numpy()] = rows.column("count").to_numpy()
    groups = group_cells(counts, centroids, plan(0, centroids.shape[1], 0).group_rows, seed)
    to_find = asked.mapInArrow(lambda batches: stages.place(batches, groups), stages.ROUTED_DDL)
    queries = _routed(known, cells, groups, found=False)
    found = _search_groups(queries.unionByName(to_find), groups, k)
    return Search(found, cells, _refused(surveyed), rejected, zero, {}, (surveyed,))


def _survey(known: DataFrame, centroids: Float32, probes: int, k: int, queries: Float32, query_ids: Int64) -> DataFrame:
    """SURVEY_DDL rows, persisted."""
    shared = known.sparkSession.sparkContext.broadcast((centroids, probes, queries, query_ids))
    return known.mapInArrow(lambda batches: stages.survey(batches, *shared.value, k), stages.SURVEY_DDL).persist()


def _counts(surveyed: DataFrame, cells: int) -> tuple[Int64, int, int]:
    """Users of each cell [cells], users with a zero vector, refused users."""
    summed = surveyed.where("query IS NULL").groupBy("cell").agg(F.sum("users").alias("users"), F.count("reason"))
    counts, zero, rejected = np.zeros(cells, dtype=np.int64), 0, 0
    for cell, users, refused in summed.collect():
        if cell is None:
            zero, rejected = users, refused
        else:
            counts[cell] = users
    return counts, zero, rejected


def _refused(surveyed: DataFrame) -> DataFrame:
    return surveyed.where("reason IS NOT NULL").select("user_id", "embedding_micros", "reason")


def _routed(known: DataFrame, cells: Cells, groups: Groups, *, found: bool) -> DataFrame:
    shared = known.sparkSession.sparkContext.broadcast((cells.centroids, groups, cells.probes))
    return known.mapInArrow(lambda batches: stages.route(batches, *shared.value, found=found), stages.ROUTED_DDL)


def _search_groups(routed: DataFrame, groups: Groups, k: int) -> DataFrame:
    """One task takes one group; then each user's lists from several groups are merged."""
    return (
        routed.repartitionById(groups.count, F.col("group"))
        .sortWithinPartitions("is_query")
        .mapInArrow(lambda batches: stages.search_group(batches, k), stages.PARTIAL_DDL)
        .repartition("user_id")
        .sortWithinPartitions("user_id")
        .mapInArrow(lambda batches: stages.merge_hits(batches, k), stages.FOUND_DDL)
    )


def _measured_probes(surveyed: DataFrame, queries: Float32, centroids: Float32, k: int, target: float) -> Probing:
    """How many probes find enough of the sample's exact neighbours."""
    ordered = F.sort_array(F.collect_list(F.struct((-F.col("similarity")).alias("far"), "user_id", "cell")))
    best = surveyed.where("query IS NOT NULL").groupBy("query").agg(F.slice(ordered, 1, k).alias("hits"))
    rows = best.select("query", F.inline("hits")).toArrow()
    owner = rows.column("query").to_numpy().astype(np.int64)
    return choose_probes(queries, centroids, owner, rows.column("cell").to_numpy().astype(np.int64), target)


def _samples(
    known: DataFrame, users: int, train_rows: int, sampling: Sampling
) -> tuple[Float32, tuple[Int64, Float32]]:
    """Vectors for k-means, and ids and vectors whose recall is measured: each of about that many users, chosen by a
    hash of their id, ordered by id."""
    buckets = 1 << 30

    def chosen(count: int, seed: int) -> Column:
        return F.pmod(F.xxhash64("user_id", F.lit(seed)), F.lit(buckets)) < int(min(1.0, count / users) * buckets)

    marked = known.withColumns(
        {"train": chosen(train_rows, sampling.seed), "asked": chosen(sampling.recall_sample, sampling.seed + 1)}
    )
    rows = marked.where("train OR asked").toArrow().sort_by("user_id")
    if rows.num_rows == 0:  # chance, with few users
        rows = marked.orderBy("user_id").limit(1).toArrow()
    batch = single_batch(rows)
    ids, units, finite, zero = units_of(batch)
    live = finite & ~zero
    train, asked = (live & batch.column(name).to_numpy(zero_copy_only=False) for name in ("train", "asked"))
    return units[train], (ids[asked], units[asked])


def _spread(rows: Float32, count: int) -> Float32:
    """At most count rows, evenly spread."""
    return rows[:: max(1, -(-len(rows) // max(1, count)))]
