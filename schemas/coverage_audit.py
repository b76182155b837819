"""How many scored rows found an embedding, and where it came from."""

from schemas.table import SLICE_COLUMNS, Column, Table

COVERAGE_AUDIT = Table(
    name="coverage_audit",
    comment="Ranking-log rows of a window, replayed against the snapshot that was live at each row's time, by tier.",
    key=("slice", "window_start", "snapshot_id", "surface", "population", "segment", "tier"),
    columns=(
        *SLICE_COLUMNS,
        Column("window_start", "TIMESTAMP", "Start of the audited window, included (UTC)"),
        Column("window_end", "TIMESTAMP", "End of the audited window, excluded (UTC)"),
        Column("snapshot_id", "STRING", "Snapshot live at the rows' time; none if there was none"),
        Column("surface", "STRING", "Surface of the rows; all for the sum over surfaces"),
        Column("population", "STRING", "scored or shown"),
        Column("segment", "STRING", "all, or a user or item segment such as user:new"),
        Column("tier", "STRING", "pair, user_mean, neighbor_pair, neighbor_mean, cold or none"),
        Column("rows", "BIGINT", "Rows answered from this tier"),
        Column("share", "DOUBLE", "rows / all rows of the same window, snapshot, surface, population and segment"),
        Column(
            "cumulative_share",
            "DOUBLE",
            "Sum of share over this tier and those before it in serving's order, none last; null in older audits",
            nullable=True,
        ),
        Column("mean_age_seconds", "DOUBLE", "Mean age of the served embedding; null for none", nullable=True),
        Column("p90_age_seconds", "DOUBLE", "90th percentile of that age; null for none", nullable=True),
    ),
    checks={
        "share_range": "share >= 0 AND share <= 1",
        "cumulative_range": "cumulative_share IS NULL OR cumulative_share >= share AND cumulative_share <= 1",
        "window_ordered": "window_start < window_end",
        "known_population": "population IN ('scored', 'shown')",
        "known_tier": "tier IN ('pair', 'user_mean', 'neighbor_pair', 'neighbor_mean', 'cold', 'none')",
    },
)
