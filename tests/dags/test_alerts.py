"""What is told when a run misses its deadline, by a real HTTP server on loopback."""

import logging
import sys
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.dags.webhook import webhook

sys.path.append(str(Path(__file__).resolve().parents[2] / "dags"))
from solaris_alerts import missed_deadline

RUN = {"dag_run": {"dag_id": "solaris_refresh", "dag_run_id": "scheduled__2026-01-03"}}
TEXT = "solaris_refresh scheduled__2026-01-03 has not ended 55 minutes after it was queued; see its graph in Airflow"


def test_the_webhook_gets_one_message_that_names_the_run(monkeypatch):
    with webhook(200) as (url, received):
        monkeypatch.setenv("SOLARIS_ALERT_URL", url)
        missed_deadline(55, RUN)
    assert received == [("application/json", {"text": TEXT})]


def test_a_webhook_that_refuses_fails_the_callback(monkeypatch):
    with webhook(500) as (url, _):
        monkeypatch.setenv("SOLARIS_ALERT_URL", url)
        with pytest.raises(HTTPError):
            missed_deadline(55, RUN)


def test_without_a_webhook_the_log_says_it(monkeypatch, caplog):
    monkeypatch.delenv("SOLARIS_ALERT_URL", raising=False)
    with caplog.at_level(logging.WARNING, "solaris"):
        missed_deadline(55.0, RUN)
    assert caplog.messages == [TEXT]
