"""Rows that the final ranking stage scored."""

from schemas.table import SLICE_COLUMNS, Column, Table

RANKING_LOG = Table(
    name="ranking_log",
    comment="One row per (request, item) that the final ranking stage scored. The slice is the ingest run that brought "
    "the row in, so event_time is always before it and late rows sit in later slices than their time.",
    key=("request_id", "item_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("request_id", "STRING", "The request in which the item was scored"),
        Column("event_time", "TIMESTAMP", "When the item was scored (UTC)"),
        Column("arrived_at", "TIMESTAMP", "When the row reached the log (UTC); runs before this do not see it"),
        Column("user_id", "BIGINT", "User; string ids are hashed, see id_map"),
        Column("item_id", "BIGINT", "Item; string ids are hashed, see id_map"),
        Column(
            "user_group", "STRING", "What the user declares (age, country), as one text; null: unknown", nullable=True
        ),
        Column("surface", "STRING", "Where the request came from (feed, reels, ...)"),
        Column("position", "INT", "Rank in the request, 0 first; null if unknown", nullable=True),
        Column("shown", "BOOLEAN", "Whether the user saw the item"),
        Column("clicked", "BOOLEAN", "Whether the user clicked (the main label)"),
        Column(
            "labels",
            "MAP<STRING, DOUBLE>",
            "Further labels known with the row (rating, watch ratio, ...)",
            nullable=True,
        ),
        Column(
            "served_embedding",
            "BINARY",
            "The pair's vector as the online model read it, float16; empty if it got none, null if this was not logged",
            nullable=True,
        ),
    ),
    checks={
        "event_before_slice": "event_time < as_of",
        "arrived_by_slice": "arrived_at <= as_of",
        "position_not_negative": "position IS NULL OR position >= 0",
    },
)
