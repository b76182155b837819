"""Labels that become known after their row (conversions)."""

from schemas.table import SLICE_COLUMNS, Column, Table

LABEL_EVENTS = Table(
    name="label_events",
    comment="One row per label that came after its ranking-log row. Training at as_of uses those arrived by then.",
    key=("request_id", "item_id", "label"),
    columns=(
        *SLICE_COLUMNS,
        Column("request_id", "STRING", "The request of the labelled row"),
        Column("item_id", "BIGINT", "The item of the labelled row"),
        Column("label", "STRING", "Which label, for example conversion"),
        Column("occurred_at", "TIMESTAMP", "When it happened (UTC)"),
        Column("arrived_at", "TIMESTAMP", "When it reached the log (UTC)"),
        Column("value", "DOUBLE", "Its value, 1.0 for a plain event"),
    ),
    checks={"occurred_before_slice": "occurred_at < as_of", "arrived_by_slice": "arrived_at <= as_of"},
)
