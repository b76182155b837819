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
from jobs.common.neighbor_search import Cells, Sampling, Search, search_all_pairs, search_cells, search_new
from jobs.common.runs import Report, Run
from jobs.common.versions import model_version_at
from solaris_udf.codec import decode
from solaris_udf.knn_plan import plan
from solaris_udf.knn_rows import from_binary, to_binary


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
    return Cells(from_binary(found.column("centroid")), int(found.column("probes")[0].as_py()))


def write_cells(run: Run, cells: Cells, version: str) -> None:
    """Stores what new users are searched with until the next full search."""
    columns = {
        "cluster_id": pa.array(range(len(cells.centroids)), pa.int32()),
        "centroid": to_binary(cells.centroids),
    }
    rows = run.spark.createDataFrame(pa.table(columns))
    constant = {"probes": F.lit(cells.probes), "model_version": F.lit(version)}
    run.write(rows.withColumns(constant), "user_clusters")


def base_of(run: Run, build: str, stored: DataFrame) -> DataFrame:
    """The full search's users with the very embeddings that it searched with, and their cell."""
    built = run.tables.read("user_neighbors").where(F.col("slice") == build)
    searched = built.select("user_id", F.col("embedding_at").alias("as_of"), F.col("cluster_id").alias("cell"))
    rows = stored.join(searched, ["user_id", "as_of"], "inner")
    return rows.select("user_id", F.unix_micros("as_of").alias("embedding_micros"), "embedding", "codec", "cell")


def search(run: Run, settings: Settings, known: DataFrame, build: str | None, stored: DataFrame) -> tuple[Search, int]:
    """The search that is due, and the number of users that it is for."""
    row = known.agg(
        F.count("*").alias("users"), F.any_value("embedding").alias("embedding"), F.any_value("codec").alias("codec")
    ).first()
    assert row is not None
    k = run.config.serving.neighbors
    if build is not None:
        cells = cells_of(run, build)
        return search_new(known, base_of(run, build, stored), cells, k, settings.seed), row.users
    dim = decode([row.embedding], row.codec).shape[1] if row.users else 0
    rule = plan(row.users, dim, settings.exact_below)
    if rule.exact:
        return search_all_pairs(known, rule, k, settings.seed), row.users
    sampling = Sampling(settings.recall_target, settings.recall_sample, settings.seed)
    return search_cells(known, row.users, rule, k, sampling), row.users


def run(run: Run, settings: Settings) -> Report:
    """Loads the users' latest embeddings, searches, saves the slice."""
    oldest = slice_of(run.as_of - timedelta(days=settings.embedding_days))
    stored = run.tables.read("user_embeddings").where((F.col("slice") > oldest) & (F.col("slice") <= run.slice))
    version = model_version_at(run, stored) or ""
    stored = stored.where(F.col("model_version") == version)
    seen = log_before(run.tables, run.as_of, settings.days * 24).select("user_id").distinct()
    build = current_build(run, version, settings.rebuild_hours)
    if build is not None:
        before = run.tables.read("user_neighbors").where((F.col("slice") < run.slice) & (F.col("build") == build))
        seen = seen.join(before.select("user_id"), "user_id", "left_anti")
    known = known_embeddings(stored, seen).persist()
    held = [known]
    try:
        found, users = search(run, settings, known, build, stored)
        held += found.held
        run.check_reject_rate(found.rejected, users)
        described = F.to_json(F.struct("user_id", "embedding_micros"))
        rejected = run.reject(found.refused.select("reason", described.alias("row")), count=found.rejected)
        written = run.write(
            found.found.select(
                "user_id",
                "cluster_id",
                "neighbors",
                F.timestamp_micros("embedding_micros").alias("embedding_at"),
                F.lit(build or run.slice).alias("build"),
                F.lit(version).alias("model_version"),
            ),
            "user_neighbors",
        )
    finally:
        for each in held:
            each.unpersist()
    figures: dict[str, float] = {
        "users": users - rejected,
        "zero_vectors": found.zero,
        "full": float(build is None),
        **found.figures,
    }
    if build is None:
        write_cells(run, found.cells, version)
        said = {name: round(figures[name], 4) for name in ("users", "cells", "probes", "recall", "exact")}
        run.tables.set_properties("user_neighbors", {"build": run.slice, **said})
    return Report(users, written, rejected, figures)


if __name__ == "__main__":
    main("find_neighbors")
