"""What became of the pairs a run predicted."""

from schemas.table import SLICE_COLUMNS, Column, Table

PRECOMPUTE_LEDGER = Table(
    name="precompute_ledger",
    comment="One row per reconciled slice, written by audit_coverage once the slice's embeddings have expired or its "
    "window has passed. Every computed pair is either hit or wasted.",
    key=("slice", "predicted_at"),
    columns=(
        *SLICE_COLUMNS,
        Column("predicted_at", "TIMESTAMP", "as_of of the reconciled predict_pairs run (UTC)"),
        Column("predicted", "BIGINT", "Pairs selected: computed + rejected + reused"),
        Column("computed", "BIGINT", "Pairs embedded by the run: hit + wasted"),
        Column("rejected", "BIGINT", "Selected pairs whose embedding was refused (NaN, wrong length, ...)"),
        Column("reused", "BIGINT", "Pairs whose earlier embedding stayed fresh"),
        Column("hit", "BIGINT", "Computed pairs that were scored at least once in the window"),
        Column("wasted", "BIGINT", "Computed pairs that were not scored in the window"),
        Column("scored_rows", "BIGINT", "Scored rows of the window"),
        Column("covered_rows", "BIGINT", "Scored rows of the window whose pair was computed or reused"),
        Column("expected_rows", "DOUBLE", "covered_rows as forecast before inference"),
        Column("cost", "DOUBLE", "Foundation-model cost of the computed pairs in FLOPs"),
        Column("seconds", "DOUBLE", "Wall time of the embed_pairs run", nullable=True),
    ),
    checks={
        "predicted_sums": "predicted = computed + rejected + reused",
        "computed_sums": "computed = hit + wasted",
        "covered_range": "covered_rows <= scored_rows",
    },
)
