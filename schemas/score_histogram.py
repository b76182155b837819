"""All candidates of a run, counted by probability."""

from schemas.table import SLICE_COLUMNS, Column, Table

SCORE_HISTOGRAM = Table(
    name="score_histogram",
    comment="The forecast of a predict_pairs run: every candidate, chosen or not, counted by probability bucket and "
    "action. Expected coverage and the marginal coverage of more budget follow from it.",
    key=("slice", "bucket", "action"),
    columns=(
        *SLICE_COLUMNS,
        Column("bucket", "DOUBLE", "Lower bound of the probability bucket; buckets are 0.01 wide"),
        Column("action", "STRING", "compute, reuse or skip"),
        Column("pairs", "BIGINT", "Candidates in the bucket"),
        Column("expected_rows", "DOUBLE", "Sum of their expected scored rows in the window"),
        Column("cost", "DOUBLE", "Foundation-model cost to compute them, in FLOPs"),
    ),
    checks={"bucket_range": "bucket >= 0 AND bucket <= 1", "known_action": "action IN ('compute', 'reuse', 'skip')"},
)
