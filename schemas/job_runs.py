"""What ran, on what, with which result."""

from schemas.table import Column, Table

JOB_RUNS = Table(
    name="job_runs",
    comment="One row per finished attempt of a job, failed ones included. Append-only.",
    key=("run_id",),
    columns=(
        Column("run_id", "STRING", "Slice, job and a random suffix"),
        Column("job", "STRING", "Name of the job"),
        Column("slice", "STRING", "Slice that the run owned"),
        Column("as_of", "TIMESTAMP", "Logical time of the run (UTC)"),
        Column("status", "STRING", "succeeded or failed"),
        Column("config_hash", "STRING", "Hash of the whole resolved config"),
        Column("rows_in", "BIGINT", "Rows read"),
        Column("rows_out", "BIGINT", "Rows written"),
        Column("rows_rejected", "BIGINT", "Rows refused, see rejected_rows"),
        Column("started_at", "TIMESTAMP", "Wall time of the start (UTC)"),
        Column("seconds", "DOUBLE", "Wall time it took"),
        Column("error", "STRING", "One line, if it failed", nullable=True),
        Column("metrics", "MAP<STRING, DOUBLE>", "The job's own figures"),
    ),
    partition_by=(),
    checks={"known_status": "status IN ('succeeded', 'failed')"},
)
