"""What is told when a run misses its deadline, by a real HTTP server on loopback."""

import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "dags"))
from solaris_alerts import missed_deadline

RUN = {"dag_run": {"dag_id": "solaris_refresh", "dag_run_id": "scheduled__2026-01-03"}}
TEXT = "solaris_refresh scheduled__2026-01-03 has not ended 55 minutes after it was queued; see its graph in Airflow"


@pytest.fixture
def webhook(monkeypatch):
    """Starts a webhook that answers with a status; what it was sent is in the list."""
    servers = []

    def start(status):
        received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.headers["Content-Type"], json.loads(body)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SOLARIS_ALERT_URL", f"http://127.0.0.1:{server.server_port}/hook")
        return received

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_webhook_gets_one_message_that_names_the_run(webhook):
    received = webhook(200)
    missed_deadline(55, RUN)
    assert received == [("application/json", {"text": TEXT})]


def test_a_webhook_that_refuses_fails_the_callback(webhook):
    webhook(500)
    with pytest.raises(HTTPError):
        missed_deadline(55, RUN)


def test_without_a_webhook_the_log_says_it(monkeypatch, caplog):
    monkeypatch.delenv("SOLARIS_ALERT_URL", raising=False)
    with caplog.at_level(logging.WARNING, "solaris"):
        missed_deadline(55.0, RUN)
    assert caplog.messages == [TEXT]
