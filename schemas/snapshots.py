"""The lookup snapshots that were built."""

from schemas.table import SLICE_COLUMNS, Column, Table

SNAPSHOTS = Table(
    name="snapshots",
    comment="One row per exported snapshot. The snapshot live at a time has the latest live_from up to then.",
    key=("slice", "snapshot_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("snapshot_id", "STRING", "Folder name below snapshots/"),
        Column("model_version", "STRING", "The one model version in it"),
        Column(
            "live_from", "TIMESTAMP", "Logical time from which it answers lookups: as_of plus the publish delay (UTC)"
        ),
        Column("status", "STRING", "built, live or retired"),
        Column("pairs", "BIGINT", "Pair embeddings in it"),
        Column("users_own", "BIGINT", "Users served by their own mean"),
        Column("users_neighbor", "BIGINT", "Users served by a neighbour's mean"),
        Column("users_cold", "BIGINT", "Users served by their group's centroid", nullable=True),
        Column("bytes", "BIGINT", "Size of its files"),
        Column("manifest_sha256", "STRING", "Hash of its manifest, which holds the hash of every file"),
    ),
    checks={"known_status": "status IN ('built', 'live', 'retired')", "live_after_run": "live_from >= as_of"},
)
