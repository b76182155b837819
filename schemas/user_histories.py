"""What each user did lately: the input of the foundation model."""

from schemas.table import SLICE_COLUMNS, Column, Table

USER_HISTORIES = Table(
    name="user_histories",
    comment="One row per user active since the previous slice. The state at a time is each user's row in their latest "
    "slice up to then; a checkpoint slice holds every user, so no read goes back further than the last one.",
    key=("slice", "user_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        Column(
            "shown",
            "ARRAY<STRUCT<item_id: BIGINT, event_time: TIMESTAMP, clicked: BOOLEAN>>",
            "The last shown events, oldest first",
        ),
        Column(
            "clicked", "ARRAY<STRUCT<item_id: BIGINT, event_time: TIMESTAMP>>", "The last clicked events, oldest first"
        ),
        Column("requests", "BIGINT", "Requests ever seen"),
        Column("scored_rows", "BIGINT", "Scored rows ever seen"),
        Column("shown_rows", "BIGINT", "Shown rows ever seen"),
        Column("clicked_rows", "BIGINT", "Clicked rows ever seen"),
        Column("last_event_time", "TIMESTAMP", "The user's latest event (UTC)"),
        Column("checkpoint", "BOOLEAN", "Whether this slice holds every user"),
    ),
    checks={
        "event_before_slice": "last_event_time < as_of",
        "counts_ordered": "clicked_rows <= shown_rows AND shown_rows <= scored_rows",
    },
)
