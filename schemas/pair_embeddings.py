"""The foundation model's pair embeddings."""

from schemas.table import CODEC_CHECK, EMBEDDING_COLUMNS, SLICE_COLUMNS, Column, Table

PAIR_EMBEDDINGS = Table(
    name="pair_embeddings",
    comment="One row per pair that a run computed. What is served is the latest row per pair within the TTL and one "
    "model version.",
    key=("slice", "user_id", "item_id", "model_version"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        Column("item_id", "BIGINT", "Item"),
        *EMBEDDING_COLUMNS,
        Column("probability", "DOUBLE", "The verifier's probability when the pair was chosen", nullable=True),
    ),
    checks=CODEC_CHECK,
)
