"""Rows that were refused, and why."""

from schemas.table import SLICE_COLUMNS, Column, Table

REJECTED_ROWS = Table(
    name="rejected_rows",
    comment="One row per refused row. Nothing is dropped without standing here.",
    key=(),
    columns=(
        *SLICE_COLUMNS,
        Column("source", "STRING", "The job that refused the row"),
        Column("reason", "STRING", "Why, in a few words"),
        Column("row", "STRING", "The row as it came, as JSON or raw text"),
    ),
    partition_by=("slice", "source"),
)
