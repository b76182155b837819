"""The jobs, one file each: `python -m jobs.NAME`, `spark-submit jobs/NAME.py` or `solaris run --job NAME`."""

# In the order of the data flow. A job is a module of this package with `Settings` and `run`.
JOBS = (
    "make_world",
    "ingest_log",
    "audit_coverage",
    "update_histories",
    "train_foundation",
    "train_verifier",
    "predict_pairs",
    "embed_pairs",
    "aggregate_users",
    "find_neighbors",
    "export_snapshot",
    "join_features",
    "evaluate_uplift",
    "simulate_ab",
    "maintain_tables",
)
