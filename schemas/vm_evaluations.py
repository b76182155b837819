"""What the embeddings are worth to a small model."""

from schemas.table import SLICE_COLUMNS, Column, Table

VM_EVALUATIONS = Table(
    name="vm_evaluations",
    comment="One row per measured figure of an uplift evaluation or a simulated A/B test.",
    key=("slice", "evaluation_id", "sweep", "setting", "model", "feature_set", "seed", "metric"),
    columns=(
        *SLICE_COLUMNS,
        Column("evaluation_id", "STRING", "One evaluation: the job, its slice and its config"),
        Column("dataset", "STRING", "Dataset of the evaluated log"),
        Column("sweep", "STRING", "main, or what is varied: coverage, budget, tier, tier_rows, ttl, codec, fm_age; ab"),
        Column("setting", "STRING", "Value of what is varied; empty for main"),
        Column("model", "STRING", "vm, fm or truth; in an A/B test the arm"),
        Column("feature_set", "STRING", "base, distillation, embeddings, both, or a control"),
        Column("seed", "INT", "Training seed; -1 for the figure over all seeds"),
        Column("metric", "STRING", "log_loss, ne, rll, rll_added, auc, calibration, transfer_ratio, revenue, ..."),
        Column("value", "DOUBLE", "The figure; null with a note when it can't be stated", nullable=True),
        Column("ci_low", "DOUBLE", "Lower end of the 95% interval", nullable=True),
        Column("ci_high", "DOUBLE", "Upper end of the 95% interval", nullable=True),
        Column("rows", "BIGINT", "Evaluation rows that the figure is of"),
        Column("note", "STRING", "Why a figure is missing, or how to read it", nullable=True),
    ),
)
