"""Who is told when a run misses its deadline: the log of the callback, and a webhook if SOLARIS_ALERT_URL names one."""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

log = logging.getLogger("solaris")


def missed_deadline(minutes: float, context: Mapping[str, Any]) -> None:
    """Called by Airflow when a run has not ended within `minutes` of being queued.

    POSTs {"text": ...} to SOLARIS_ALERT_URL, the form that chat webhooks take. Raises if the webhook refuses, so that
    the callback shows as failed.
    """
    run = context.get("dag_run") or {}
    name = f"{run.get('dag_id', 'a DAG')} {run.get('dag_run_id', '')}".strip()
    text = f"{name} has not ended {minutes:g} minutes after it was queued; see its graph in Airflow"
    log.warning(text)
    if url := os.environ.get("SOLARIS_ALERT_URL"):
        body = json.dumps({"text": text}).encode()
        with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=30):
            log.info("told the webhook")
