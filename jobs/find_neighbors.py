"""The most similar users of each user, for users and pairs without an embedding of their own.

Takes every user seen in the ranking log in the last days who has a user embedding (the latest one known at as_of), and
writes the serving.neighbors nearest by cosine, and the user's cluster, to user_neighbors. Up to exact_below users every
pair is compared; above, users are put into cells by k-means and only the nearest cells are searched, as many as the
recall target asks for, measured against exact search on a sample. docs/neighbors.md has the rules.
"""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of
from jobs.common.config import Section
from jobs.common.log import latest_per, log_before
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.versions import model_version_at
from solaris_udf import knn_search as stages
from solaris_udf.knn_plan import Plan, Probing, choose_probes, group_cells, plan, train_centroids


class Settings(Section):
    """The [find_neighbors] section."""

    section = "find_neighbors"
    days: float = Field(7.0, gt=0, description="Users seen in the ranking log in this many days get neighbours")
    embedding_days: float = Field(30.0, gt=0, description="A user embedding older than this is not used")
    exact_below: int = Field(20_000, ge=0, description="Up to this many users, every pair of users is compared")
    recall_target: float = Field(0.95, gt=0, le=1, description="Recall@k that probing must reach on the sample")
    recall_sample: int = Field(1_000, ge=100, description="Users, about, whose recall is measured against exact search")
    seed: int = Field(17, description="Seed of the samples and of k-means")


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


def known_embeddings(stored: DataFrame, seen: DataFrame) -> DataFrame:
    """user_id, embedding_micros, embedding, codec: the latest of each seen user."""
    latest = latest_per(stored.join(seen, on="user_id", how="left_semi"), "user_id")
    return latest.select("user_id", F.unix_micros("as_of").alias("embedding_micros"), "embedding", "codec")


def search_all_pairs(units: DataFrame, rule: Plan, k: int, seed: int) -> DataFrame:
    """FOUND_DDL rows by comparing every pair. The vectors, bounded by the plan, travel to the workers by broadcast."""
    # Ordered, so that the broadcast is the same whatever the partitions were.
    rows = units.where("NOT zero").select("user_id", "vector").toArrow().sort_by("user_id")
    ids, base = rows.column("user_id").to_numpy(), stages.from_binary(rows.column("vector"))
    centroids = train_centroids(_spread(base, rule.train_rows), rule.cells, seed)
    shared = units.sparkSession.sparkContext.broadcast((base, ids, centroids))
    return units.mapInArrow(lambda batches: stages.search_exactly(batches, *shared.value, k), stages.FOUND_DDL)


def search_cells(
    units: DataFrame, rule: Plan, sizes: Sizes, k: int, settings: Settings
) -> tuple[DataFrame, dict[str, float], DataFrame]:
    """FOUND_DDL rows by probing cells, the search's figures, and the persisted frame to release afterwards.

    The driver sees the k-means sample, the recall sample and one number a cell: all bounded by the plan.
    """
    context = units.sparkSession.sparkContext
    searchable = units.where("NOT zero")
    train = _sample(searchable, rule.train_rows / sizes.searchable, settings.seed)
    centroids = train_centroids(train[1], rule.cells, settings.seed)
    shared = context.broadcast(centroids)
    assigned = searchable.mapInArrow(
        lambda batches: stages.assign_cells(batches, shared.value), stages.ASSIGNED_DDL
    ).persist()
    sample_ids, sample = _sample(searchable, settings.recall_sample / sizes.searchable, settings.seed + 1)
    probing = _measured_probes(assigned, sample_ids, sample, centroids, k, settings.recall_target)

    cell_rows = assigned.groupBy("cell").count().toArrow()
    counts = np.zeros(len(centroids), dtype=np.int64)
    counts[cell_rows.column("cell").to_numpy()] = cell_rows.column("count").to_numpy()
    groups = group_cells(counts, centroids, rule.group_rows, settings.seed)
    routed = assigned.mapInArrow(
        lambda batches: stages.route(batches, shared.value, groups, probing.probes), stages.ROUTED_DDL
    )
    partial = (
        routed.repartitionById(groups.count, F.col("group"))
        .sortWithinPartitions("group", "is_query")
        .mapInArrow(lambda batches: stages.search_groups(batches, k), stages.PARTIAL_DDL)
    )
    found = (
        partial.repartition("user_id")
        .sortWithinPartitions("user_id")
        .mapInArrow(lambda batches: stages.merge_hits(batches, k), stages.FOUND_DDL)
    )
    nobody = F.array().cast(stages.NEIGHBORS_DDL).alias("neighbors")
    zero = units.where("zero").select("user_id", "embedding_micros", F.lit(0).alias("cluster_id"), nobody)
    figures = {
        "cells": len(centroids),
        "probes": probing.probes,
        "recall": probing.recall,
        "recall_sample": len(sample_ids),
        "groups": groups.count,
        "largest_cell": int(counts.max()),
    }
    return found.unionByName(zero), figures, assigned


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


def _sizes(units: DataFrame) -> Sizes:
    row = units.agg(
        F.count("vector").alias("users"),
        F.count_if(F.col("vector").isNotNull() & F.col("zero")).alias("zero"),
        F.count("reason").alias("rejected"),
        F.max(F.length("vector")).alias("width"),
    ).first()
    assert row is not None
    return Sizes(row.users, row.zero, row.rejected, (row.width or 0) // 4)


def run(run: Run, settings: Settings) -> Report:
    """Loads the users' latest embeddings, searches, saves the slice."""
    oldest = slice_of(run.as_of - timedelta(days=settings.embedding_days))
    stored = run.tables.read("user_embeddings").where((F.col("slice") > oldest) & (F.col("slice") <= run.slice))
    version = model_version_at(run, stored) or ""
    seen = log_before(run.tables, run.as_of, settings.days * 24).select("user_id").distinct()
    k = run.config.serving.neighbors
    units = (
        known_embeddings(stored.where(F.col("model_version") == version), seen)
        .mapInArrow(stages.unit_rows, stages.UNITS_DDL)
        .persist()
    )
    held = [units]
    try:
        sizes = _sizes(units)
        total = sizes.users + sizes.rejected
        run.check_reject_rate(sizes.rejected, total)
        described = F.to_json(F.struct("user_id", "embedding_micros"))
        refused = units.where(F.col("reason").isNotNull()).select("reason", described.alias("row"))
        rejected = run.reject(refused, count=sizes.rejected)
        usable = units.where(F.col("reason").isNull())
        rule = plan(sizes.searchable, sizes.dim, settings.exact_below)
        if rule.exact:
            found = search_all_pairs(usable, rule, k, settings.seed)
            figures: dict[str, float] = {"cells": 1, "probes": 1, "recall": 1.0, "groups": 1}
        else:
            found, figures, assigned = search_cells(usable, rule, sizes, k, settings)
            held.append(assigned)
        written = run.write(
            found.select(
                "user_id",
                "cluster_id",
                "neighbors",
                F.timestamp_micros("embedding_micros").alias("embedding_at"),
                F.lit(version).alias("model_version"),
            ),
            "user_neighbors",
        )
    finally:
        for frame in held:
            frame.unpersist()
    figures |= {"users": sizes.users, "zero_vectors": sizes.zero, "exact": float(rule.exact)}
    return Report(total, written, rejected, figures)


if __name__ == "__main__":
    main("find_neighbors")
