"""The pairs chosen for the next window."""

from schemas.table import SLICE_COLUMNS, Column, Table

CANDIDATE_PAIRS = Table(
    name="candidate_pairs",
    comment="One row per selected pair: those to compute now and those whose stored embedding stays fresh through the "
    "window (reused). The rest is kept as score_histogram only.",
    key=("slice", "user_id", "item_id"),
    columns=(
        *SLICE_COLUMNS,
        Column("user_id", "BIGINT", "User"),
        Column("item_id", "BIGINT", "Item"),
        Column("probability", "DOUBLE", "P(the ranker scores the pair in the window), calibrated"),
        Column("expected_rows", "DOUBLE", "Expected scored rows of the pair in the window"),
        Column("sources", "ARRAY<STRING>", "The candidate sources that named the pair, sorted"),
        Column("rank", "BIGINT", "Place within the user, 1 first"),
        Column("cost", "DOUBLE", "Foundation-model cost of the pair in FLOPs; 0 if reused"),
        Column("action", "STRING", "compute or reuse"),
    ),
    checks={
        "probability_range": "probability >= 0 AND probability <= 1",
        "expected_rows_not_negative": "expected_rows >= 0",
        "cost_not_negative": "cost >= 0",
        "known_action": "action IN ('compute', 'reuse')",
    },
)
