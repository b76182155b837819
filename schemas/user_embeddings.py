"""Each user's mean embedding."""

from schemas.table import CODEC_CHECK, EMBEDDING_COLUMNS, SLICE_COLUMNS, Column, Table

USER_EMBEDDINGS = Table(
    name="user_embeddings",
    comment="One row per user with a pair embedding computed in (as_of - 24 h, as_of]: mean of the latest per pair.",
    key=("slice", "user_id", "model_version"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        *EMBEDDING_COLUMNS,
        Column("pair_count", "INT", "Pairs in the mean"),
        Column("newest_at", "TIMESTAMP", "as_of of the newest pair in the mean (UTC)"),
    ),
    checks={**CODEC_CHECK, "pairs_positive": "pair_count > 0"},
)
