"""What the pipeline needs once a day: a fresh verifier and tidy tables.

## What it does
`train_verifier` learns from the last windows which pairs are scored, for the next **solaris_refresh**.
`maintain_tables` then compacts small files, drops slices past their retention and vacuums what no snapshot and no
reader needs.

## Parameters
`as_of` is the logical time, by default the end of the data interval: the verifier of a past day is trained on what was
known on that day. `dataset`, `config` and `settings` choose and override the configuration.

## When something fails
Clear the failed task; each replaces its own output. Until then the refresh goes on with the last verifier. A verifier
whose check fails is not published, and the task says which figure was out of bounds.
"""

from datetime import timedelta

from airflow.sdk import chain
from solaris_common import DAILY_CRON, VERIFIER, common_params, dag, job

with dag("solaris_daily", __doc__, common_params(), timedelta(hours=8), schedule=DAILY_CRON, tags=["daily"]):
    verifier = job("train_verifier", [VERIFIER])
    maintain = job("maintain_tables")

    chain(verifier, maintain)
