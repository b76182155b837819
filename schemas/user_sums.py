"""Sums of pair embeddings, from which the next run's means come without reading the window again."""

from schemas.table import SLICE_COLUMNS, Column, Table

USER_SUMS = Table(
    name="user_sums",
    comment="What a run of aggregate_users added to the sums per user and time of computation: the slice's own pairs, "
    "less what they replace of earlier times. A full slice holds the sums of the whole window and starts anew.",
    key=("slice", "user_id", "computed_at"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        Column("computed_at", "TIMESTAMP", "as_of of the pair embeddings in the sum (UTC)"),
        Column("sums", "BINARY", "Weighted sum of the vectors, little-endian float64"),
        Column("weight", "DOUBLE", "Sum of the weights; negative where more was replaced than added"),
        Column("pair_count", "INT", "Pairs added less pairs replaced"),
        Column("pairs_run", "STRING", "run_id of the pair embeddings: another one means that the sum is out of date"),
        Column("basis", "STRING", "Model version, window and weighting of the sums; others can't be added to them"),
        Column("full", "BOOLEAN", "Whether the slice holds the sums of the whole window"),
    ),
    checks={"not_of_later": "computed_at <= as_of"},
)
