"""Neighbour searches as DataFrames: every pair, through cells, and of new users through the cells of a past build.

Input: UNITS_DDL rows of users with a finite vector; output: FOUND_DDL rows, one for each. What runs in a task is in
solaris_udf/knn_search.py.
"""

from dataclasses import dataclass

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from solaris_udf import knn_search as stages
from solaris_udf.knn import Float32
from solaris_udf.knn_plan import Groups, Plan, Probing, choose_probes, group_cells, plan, train_centroids


@dataclass(frozen=True)
class Sizes:
    """What is known after one pass over the users."""

    users: int  # with a finite vector, zero ones too
    zero: int
    rejected: int
    dim: int

    @property
    def searchable(self) -> int:
        return self.users - self.zero


@dataclass(frozen=True)
class Cells:
    """What a later search among the same users needs: the centroids [c, d], and how many a query probes."""

    centroids: Float32
    probes: int


def search_all_pairs(units: DataFrame, rule: Plan, k: int, seed: int) -> tuple[DataFrame, Cells]:
    """Compares every pair. The vectors, bounded by the plan, travel to the workers by broadcast."""
    # Ordered, so that the broadcast is the same whatever the partitions were.
    rows = units.where("NOT zero").select("user_id", "vector").toArrow().sort_by("user_id")
    ids, base = rows.column("user_id").to_numpy(), stages.from_binary(rows.column("vector"))
    centroids = train_centroids(_spread(base, rule.train_rows), rule.cells, seed)
    shared = units.sparkSession.sparkContext.broadcast((base, ids, centroids))
    found = units.mapInArrow(lambda batches: stages.search_exactly(batches, *shared.value, k), stages.FOUND_DDL)
    return found, Cells(centroids, max(1, len(centroids)))


def search_cells(
    units: DataFrame, rule: Plan, sizes: Sizes, k: int, *, recall_target: float, recall_sample: int, seed: int
) -> tuple[DataFrame, Cells, dict[str, float], DataFrame]:
    """Probes cells. Also returns the search's figures, and the persisted frame to release afterwards.

    The driver sees the k-means sample, the recall sample and one number a cell: all bounded by the plan.
    """
    searchable = units.where("NOT zero")
    train = _sample(searchable, rule.train_rows / sizes.searchable, seed)
    centroids = train_centroids(train[1], rule.cells, seed)
    assigned = _assigned(searchable, centroids).persist()
    sample_ids, sample = _sample(searchable, recall_sample / sizes.searchable, seed + 1)
    probing = _measured_probes(assigned, sample_ids, sample, centroids, k, recall_target)
    counts = _counts(assigned, len(centroids))
    groups = group_cells(counts, centroids, rule.group_rows, seed)
    shared = units.sparkSession.sparkContext.broadcast(centroids)
    routed = assigned.mapInArrow(
        lambda batches: stages.route(batches, shared.value, groups, probing.probes), stages.ROUTED_DDL
    )
    figures = {
        "cells": len(centroids),
        "recall": probing.recall,
        "recall_sample": len(sample_ids),
        "groups": groups.count,
        "largest_cell": int(counts.max()),
    }
    found = _search_groups(routed, groups, k).unionByName(without_neighbors(units))
    return found, Cells(centroids, probing.probes), figures, assigned


def search_new(units: DataFrame, base: DataFrame, cells: Cells, k: int, seed: int) -> tuple[DataFrame, DataFrame]:
    """The nearest of each new user among the users of a build (base, UNITS_DDL, no zero vectors), by its own cells and
    probes. Also returns the persisted frame to release afterwards."""
    centroids = cells.centroids
    assigned = _assigned(base, centroids).persist()
    size = plan(len(centroids), centroids.shape[1], 0).group_rows
    groups = group_cells(_counts(assigned, len(centroids)), centroids, size, seed)
    shared = units.sparkSession.sparkContext.broadcast(centroids)
    queries = _assigned(units.where("NOT zero"), centroids).mapInArrow(
        lambda batches: stages.route_queries(batches, shared.value, groups, cells.probes), stages.ROUTED_DDL
    )
    to_find = assigned.mapInArrow(lambda batches: stages.route_base(batches, groups), stages.ROUTED_DDL)
    found = _search_groups(queries.unionByName(to_find), groups, k).unionByName(without_neighbors(units))
    return found, assigned


def _assigned(searchable: DataFrame, centroids: Float32) -> DataFrame:
    shared = searchable.sparkSession.sparkContext.broadcast(centroids)
    return searchable.mapInArrow(lambda batches: stages.assign_cells(batches, shared.value), stages.ASSIGNED_DDL)


def _counts(assigned: DataFrame, cells: int) -> np.ndarray:
    """Users of each cell [cells]."""
    rows = assigned.groupBy("cell").count().toArrow()
    counts = np.zeros(cells, dtype=np.int64)
    counts[rows.column("cell").to_numpy()] = rows.column("count").to_numpy()
    return counts


def _search_groups(routed: DataFrame, groups: Groups, k: int) -> DataFrame:
    """One task takes one group; then each user's lists from several groups are merged."""
    return (
        routed.repartitionById(groups.count, F.col("group"))
        .sortWithinPartitions("group", "is_query")
        .mapInArrow(lambda batches: stages.search_groups(batches, k), stages.PARTIAL_DDL)
        .repartition("user_id")
        .sortWithinPartitions("user_id")
        .mapInArrow(lambda batches: stages.merge_hits(batches, k), stages.FOUND_DDL)
    )


def without_neighbors(units: DataFrame) -> DataFrame:
    """The FOUND_DDL rows of zero vectors, which have no direction to compare."""
    nobody = F.array().cast(stages.NEIGHBORS_DDL).alias("neighbors")
    return units.where("zero").select("user_id", "embedding_micros", F.lit(0).alias("cluster_id"), nobody)


def _measured_probes(
    assigned: DataFrame, sample_ids: np.ndarray, sample: np.ndarray, centroids: np.ndarray, k: int, target: float
) -> Probing:
    """Exact neighbours of the sample over all users, and how many probes find enough of them."""
    shared = assigned.sparkSession.sparkContext.broadcast((sample, sample_ids))
    local = assigned.mapInArrow(lambda batches: stages.sample_neighbors(batches, *shared.value, k), stages.SAMPLE_DDL)
    ordered = F.sort_array(F.collect_list(F.struct((-F.col("similarity")).alias("far"), "user_id", "cell")))
    best = local.groupBy("query").agg(F.slice(ordered, 1, k).alias("hits")).select("query", F.inline("hits")).toArrow()
    owner = best.column("query").to_numpy().astype(np.int64)
    return choose_probes(sample, centroids, owner, best.column("cell").to_numpy().astype(np.int64), target)


def _sample(units: DataFrame, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [s] and vectors [s, d] of about that share of the users, chosen by a hash of their id, ordered by id."""
    buckets = 1 << 30
    chosen = F.pmod(F.xxhash64("user_id", F.lit(seed)), F.lit(buckets)) < int(min(1.0, share) * buckets)
    rows = units.where(chosen).select("user_id", "vector").toArrow().sort_by("user_id")
    return rows.column("user_id").to_numpy(), stages.from_binary(rows.column("vector"))


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most count rows, evenly spread."""
    return rows[:: max(1, -(-len(rows) // max(1, count)))]
