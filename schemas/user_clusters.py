"""The clusters of the users: the cells of a neighbour search."""

from schemas.table import SLICE_COLUMNS, Column, Table

USER_CLUSTERS = Table(
    name="user_clusters",
    comment="One row per cluster of a full neighbour search (a build of user_neighbors). Users who are new since then "
    "are put into the cluster of the most similar centroid, and searched for in as many clusters as the build did.",
    key=("slice", "cluster_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("cluster_id", "INT", "The cluster, from 0"),
        Column("centroid", "BINARY", "Its unit vector, little-endian float32"),
        Column("probes", "INT", "How many of the nearest clusters a user is searched for in"),
        Column("model_version", "STRING", "Hash of the foundation model and its projection; versions never mix"),
    ),
    checks={"cluster_not_negative": "cluster_id >= 0", "probes_positive": "probes > 0"},
)
