"""The most similar users of each user, for users and pairs without an embedding of their own.

Takes every user seen in the ranking log in the last days who has a user embedding (the latest one known at as_of), and
writes the serving.neighbors nearest by cosine, and the user's cluster, to user_neighbors. Every rebuild_hours that is a
full search: up to exact_below users every pair is compared; above, users are put into cells by k-means and only the
nearest cells are searched, as many as the recall target asks for, measured against exact search on a sample. In between
only the users who are new since then are searched for, among those of the full search and through its cells.
docs/neighbors.md has the rules.
"""

from datetime import timedelta

import pyarrow as pa
from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import as_of_of, slice_of
from jobs.common.config import Section
from jobs.common.log import latest_per, log_before
from jobs.common.main import main
from jobs.common.neighbor_search import Cells, Sizes, search_all_pairs, search_cells, search_new, without_neighbors
from jobs.common.runs import Report, Run
from jobs.common.versions import model_version_at
from solaris_udf import knn_search as stages
from solaris_udf.knn_plan import plan


class Settings(Section):
    """The [find_neighbors] section."""

    section = "find_neighbors"
    days: float = Field(7.0, gt=0, description="Users seen in the ranking log in this many days get neighbours")
    embedding_days: float = Field(30.0, gt=0, description="A user embedding older than this is not used")
    rebuild_hours: float = Field(
        24.0, ge=0, description="A full search this often; between two of them new users are added to the last one"
    )
    exact_below: int = Field(20_000, ge=0, description="Up to this many users, every pair of users is compared")
    recall_target: float = Field(0.95, gt=0, le=1, description="Recall@k that probing must reach on the sample")
    recall_sample: int = Field(1_000, ge=100, description="Users, about, whose recall is measured against exact search")
    seed: int = Field(17, description="Seed of the samples and of k-means")


def known_embeddings(stored: DataFrame, seen: DataFrame) -> DataFrame:
    """user_id, embedding_micros, embedding, codec: the latest of each seen user."""
    latest = latest_per(stored.join(seen, on="user_id", how="left_semi"), "user_id")
    return latest.select("user_id", F.unix_micros("as_of").alias("embedding_micros"), "embedding", "codec")


def current_build(run: Run, version: str, rebuild_hours: float) -> str | None:
    """The slice of the full search that this run adds to; None if the last one is too old, or of another model.

    The run's own slice does not count, so that a retry does what the first try did.
    """
    rows = run.tables.read("user_clusters").where((F.col("slice") < run.slice) & (F.col("model_version") == version))
    build: str | None = rows.agg(F.max("slice").alias("slice")).first()["slice"]  # type: ignore[index]
    too_old = build is None or run.as_of - as_of_of(build) >= timedelta(hours=rebuild_hours)
    return None if too_old else build


def cells_of(run: Run, build: str) -> Cells:
    """The cells that the full search of that slice stored: at most 16,384."""
    rows = run.tables.read("user_clusters").where(F.col("slice") == build)
    found = rows.select("cluster_id", "centroid", "probes").toArrow().sort_by("cluster_id")
    return Cells(stages.from_binary(found.column("centroid")), int(found.column("probes")[0].as_py()))


def write_cells(run: Run, cells: Cells, version: str) -> None:
    """Stores what new users are searched with until the next full search."""
    columns = {
        "cluster_id": pa.array(range(len(cells.centroids)), pa.int32()),
        "centroid": stages.to_binary(cells.centroids),
    }
    rows = run.spark.createDataFrame(pa.table(columns))
    constant = {"probes": F.lit(cells.probes), "model_version": F.lit(version)}
    run.write(rows.withColumns(constant), "user_clusters")


def base_of(run: Run, build: str, stored: DataFrame) -> DataFrame:
    """UNITS_DDL rows of the full search's users with a direction: the very vectors that it searched with."""
    built = run.tables.read("user_neighbors").where(F.col("slice") == build)
    searched = built.select("user_id", F.col("embedding_at").alias("as_of"))
    vectors = stored.join(searched, ["user_id", "as_of"], "left_semi")
    units = vectors.select("user_id", F.unix_micros("as_of").alias("embedding_micros"), "embedding", "codec")
    return units.mapInArrow(stages.unit_rows, stages.UNITS_DDL).where("reason IS NULL AND NOT zero")


def sizes_of(units: DataFrame) -> Sizes:
    """One pass over UNITS_DDL rows."""
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
    stored = stored.where(F.col("model_version") == version)
    users = log_before(run.tables, run.as_of, settings.days * 24).select("user_id").distinct()
    build = current_build(run, version, settings.rebuild_hours)
    if build is not None:
        before = run.tables.read("user_neighbors").where((F.col("slice") < run.slice) & (F.col("build") == build))
        users = users.join(before.select("user_id"), "user_id", "left_anti")
    k = run.config.serving.neighbors
    units = known_embeddings(stored, users).mapInArrow(stages.unit_rows, stages.UNITS_DDL).persist()
    held, cells = [units], None
    try:
        sizes = sizes_of(units)
        total = sizes.users + sizes.rejected
        run.check_reject_rate(sizes.rejected, total)
        described = F.to_json(F.struct("user_id", "embedding_micros"))
        refused = units.where(F.col("reason").isNotNull()).select("reason", described.alias("row"))
        rejected = run.reject(refused, count=sizes.rejected)
        usable = units.where(F.col("reason").isNull())
        figures: dict[str, float] = {"users": sizes.users, "zero_vectors": sizes.zero, "full": float(build is None)}
        if build is not None and not sizes.searchable:
            found = without_neighbors(usable)
        elif build is not None:
            cells = cells_of(run, build)
            found, frame = search_new(usable, base_of(run, build, stored), cells, k, settings.seed)
            held.append(frame)
        else:
            rule = plan(sizes.searchable, sizes.dim, settings.exact_below)
            if rule.exact:
                found, cells = search_all_pairs(usable, rule, k, settings.seed)
                figures |= {"exact": 1.0, "cells": 1, "probes": 1, "recall": 1.0, "groups": 1}
            else:
                found, cells, measured, frame = search_cells(
                    usable,
                    rule,
                    sizes,
                    k,
                    recall_target=settings.recall_target,
                    recall_sample=settings.recall_sample,
                    seed=settings.seed,
                )
                held.append(frame)
                figures |= {"exact": 0.0, "probes": cells.probes, **measured}
        written = run.write(
            found.select(
                "user_id",
                "cluster_id",
                "neighbors",
                F.timestamp_micros("embedding_micros").alias("embedding_at"),
                F.lit(build or run.slice).alias("build"),
                F.lit(version).alias("model_version"),
            ),
            "user_neighbors",
        )
        if build is None and cells is not None:
            write_cells(run, cells, version)
            said = {name: round(figures[name], 4) for name in ("users", "cells", "probes", "recall", "exact")}
            run.tables.set_properties("user_neighbors", {"build": run.slice, **said})
    finally:
        for each in held:
            each.unpersist()
    return Report(total, written, rejected, figures)


if __name__ == "__main__":
    main("find_neighbors")
