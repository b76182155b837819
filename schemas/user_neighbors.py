"""The k most similar users of each user."""

from schemas.table import SLICE_COLUMNS, Column, Table

USER_NEIGHBORS = Table(
    name="user_neighbors",
    comment="One row per user seen in the last days with a known user embedding: the k nearest users by cosine in the "
    "foundation model's space, and the user's cluster. A zero vector has no neighbours. Most slices hold only "
    "the users who are new since the last full search: what is known at a time is the rows of the latest build up to "
    "then.",
    key=("slice", "user_id", "model_version"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        Column("cluster_id", "INT", "The user's cluster, from 0"),
        Column(
            "neighbors",
            "ARRAY<STRUCT<user_id: BIGINT, similarity: FLOAT>>",
            "Nearest users, most similar first, ties by id; never the user itself",
        ),
        Column("embedding_at", "TIMESTAMP", "as_of of the user embedding that was searched with (UTC)"),
        Column("build", "STRING", "Slice of the full search whose clusters these are, and in whose users was searched"),
        Column("model_version", "STRING", "Hash of the foundation model and its projection; versions never mix"),
    ),
    checks={"cluster_not_negative": "cluster_id >= 0", "build_not_later": "build <= slice"},
)
