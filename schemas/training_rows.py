"""Point-in-time training rows for the online models."""

from schemas.table import SLICE_COLUMNS, Column, Table

TRAINING_ROWS = Table(
    name="training_rows",
    comment="One row per ranking-log row of the joined window, with what the snapshot live at its time would serve.",
    key=("slice", "request_id", "item_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("request_id", "STRING", "The request in which the item was scored"),
        Column("event_time", "TIMESTAMP", "When the item was scored (UTC)"),
        Column("user_id", "BIGINT", "User"),
        Column("item_id", "BIGINT", "Item"),
        Column("surface", "STRING", "Where the request came from"),
        Column("position", "INT", "Rank in the request, 0 first", nullable=True),
        Column("shown", "BOOLEAN", "Whether the user saw the item"),
        Column("clicked", "BOOLEAN", "Whether the user clicked"),
        Column(
            "labels",
            "MAP<STRING, DOUBLE>",
            "Further labels, late ones included if they had arrived by as_of",
            nullable=True,
        ),
        Column("snapshot_id", "STRING", "Snapshot live at the row's time; null if there was none", nullable=True),
        Column("model_version", "STRING", "Model version of that snapshot", nullable=True),
        Column("tier", "STRING", "Where the vector came from; none if there is no vector"),
        Column("embedding", "BINARY", "The served vector, float16; null for tier none", nullable=True),
        Column("age_seconds", "INT", "Age of the served vector at event_time; -1 for none"),
        Column("similarity", "FLOAT", "Cosine to the user whose vector was served; 1 for own, 0 for none"),
        Column("user_tier", "STRING", "Where the user-level vector came from: user_mean, neighbor_mean, cold or none"),
        Column("user_embedding", "BINARY", "The user-level vector, float16; null for none", nullable=True),
        Column("user_age_seconds", "INT", "Age of the user-level vector; -1 for none"),
        Column("user_similarity", "FLOAT", "Cosine to the user whose mean was served; 1 for own, 0 for none"),
    ),
    checks={
        "event_before_slice": "event_time < as_of",
        "known_tier": "tier IN ('pair', 'user_mean', 'neighbor_pair', 'neighbor_mean', 'cold', 'none')",
        "none_is_null": "(tier = 'none') = (embedding IS NULL)",
    },
)
