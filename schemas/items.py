"""What is known about items."""

from schemas.table import SLICE_COLUMNS, Column, Table

ITEMS = Table(
    name="items",
    comment="One row per new or changed item and ingest run. The state at a time is each item's row in its latest "
    "slice up to then.",
    key=("slice", "item_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("item_id", "BIGINT", "Item"),
        Column("category_id", "BIGINT", "Main category; null if unknown", nullable=True),
        Column("categories", "ARRAY<BIGINT>", "All categories, the main one first", nullable=True),
        Column("advertiser_id", "BIGINT", "Advertiser, publisher or author", nullable=True),
        Column("created_at", "TIMESTAMP", "When the item became available (UTC)", nullable=True),
        Column("bid", "DOUBLE", "Value of a click to the platform, in the log's currency", nullable=True),
        Column("features", "ARRAY<FLOAT>", "Dense features, the same length for every item", nullable=True),
    ),
)
