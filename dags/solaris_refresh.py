"""Brings the tables and the snapshot to one point in time: new log rows in, the next window's embeddings out.

## What it does
`ingest_log` → `update_histories` → `predict_pairs` → `embed_pairs` → `aggregate_users` → `find_neighbors` →
`export_snapshot`, and beside them `audit_coverage`, which measures the window that has just passed. `find_neighbors`
searches the neighbours of all users once a day, and of the new ones in between. The run's logical time `as_of` is the
end of its data interval; a job reads only what was known then and replaces exactly its own slice.

## Before the first run
- A foundation model must exist: `solaris run --from T0 --to T1` trains the reference model when it is due, or put your
  own below `models/foundation/`. Without a verifier `predict_pairs` ranks by decayed frequency.
- `airflow connections add solaris_spark --conn-type spark --conn-host 'local[*]'` (or your master), and
  `airflow pools set solaris_gpu 1 'foundation model'`: a task in a pool that does not exist is never started.
- The schedule must match `window.hours` of the config; set `SOLARIS_REFRESH_CRON` where a window is not an hour.

## Parameters
`as_of` runs another slice than the interval's. `budget` limits `predict_pairs`. `dataset`, `config` and `settings`
choose and override the configuration. What does not validate is refused by the form.

## When something fails
- Each task ends with the job's own line: exit code 2 is a mistake in input or config (the line says how to fix it), 1
  a run that refused to publish, for example too many rejected rows. The table `job_runs` has the same line.
- Clear the failed task: it replaces its slice, a second run never adds rows twice.
- A failed `audit_coverage` (a limit such as `audit_coverage.min_coverage` was not met) holds `export_snapshot` back;
  the old snapshot stays live. Clear it after the cause is gone, or mark it as success to publish all the same.
- A missed run loses nothing: the next one ingests all that has arrived. To fill in the slices themselves, start a
  backfill from the UI; runs go one at a time, oldest first.
- Stopping a task kills its Spark application.
"""

from datetime import timedelta

from airflow.sdk import chain
from solaris_common import REFRESH_CRON, SNAPSHOT, budget_param, common_params, dag, job, table

PARAMS = {**common_params(), **budget_param()}

with dag("solaris_refresh", __doc__, PARAMS, timedelta(minutes=55), schedule=REFRESH_CRON, tags=["hourly"]):
    ingest = job("ingest_log", [table("ranking_log"), table("items"), table("label_events")])
    audit = job("audit_coverage", [table("coverage_audit"), table("precompute_ledger")])
    histories = job("update_histories", [table("user_histories")])
    predict = job("predict_pairs", [table("candidate_pairs"), table("score_histogram")])
    embed = job("embed_pairs", [table("pair_embeddings")], gpu=True, execution_timeout=timedelta(hours=6))
    aggregate = job("aggregate_users", [table("user_embeddings")])
    neighbors = job(
        "find_neighbors", [table("user_neighbors"), table("user_clusters")], execution_timeout=timedelta(hours=6)
    )
    export = job("export_snapshot", [table("snapshots"), SNAPSHOT])

    chain(ingest, histories, predict, embed, aggregate, neighbors, export)
    chain(ingest, audit, export)
