"""The map of users: a sample of them on the plane on which they differ most."""

from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import functions as F

from jobs.common.log import latest_build
from jobs.common.tables import Tables
from solaris_udf.codec import decode
from solaris_udf.knn import unit_vectors

SAMPLE = 2_000  # users: all that comes to the driver


def user_map(tables: Tables) -> list[dict[str, Any]]:
    """x, y, cluster_id of about SAMPLE users, in the order of their id.

    The same in each row: share, of the variance that the plane holds, and users, in the whole build. The users are
    those of the latest build, chosen by a hash of their id, with the embeddings that were searched with.
    """
    build = latest_build(tables.read("user_neighbors")).select(
        "user_id", "cluster_id", "model_version", F.col("embedding_at").alias("as_of")
    )
    users = build.count()
    if users < 3:
        return []
    buckets = 1 << 30
    chosen = F.pmod(F.xxhash64("user_id"), F.lit(buckets)) < int(min(1.0, SAMPLE / users) * buckets)
    stored = tables.read("user_embeddings").select("user_id", "as_of", "model_version", "embedding", "codec")
    found = stored.join(F.broadcast(build.where(chosen)), ["user_id", "as_of", "model_version"]).orderBy("user_id")
    rows = found.select("cluster_id", "embedding", "codec").collect()
    vectors = [decode([row.embedding], row.codec)[0] for row in rows]
    if len(vectors) < 3:
        return []
    places, share = principal_plane(unit_vectors(np.stack(vectors))[0])
    return [
        {"x": float(x), "y": float(y), "cluster_id": row.cluster_id, "share": share, "users": users}
        for (x, y), row in zip(places.tolist(), rows, strict=True)
    ]


def principal_plane(vectors: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], float]:
    """Coordinates [n, 2] on the first two principal components of vectors [n, d], and their share of the variance.

    The sign of a component is free: its largest weight is made positive. One dimension: the second coordinate is 0.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * np.sign(np.take_along_axis(axes[:2], np.abs(axes[:2]).argmax(axis=1)[:, None], 1))
    places = np.zeros((len(vectors), 2))
    places[:, : len(axes)] = centred @ axes.T
    total = float((sizes**2).sum())
    return places, float((sizes[:2] ** 2).sum()) / total if total > 0 else 1.0
