"""The local Airflow of `make airflow` as its tests see it: its REST API, its logs, its processes and their sockets."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from urllib.request import Request, urlopen

import psutil

from tests.processes import MARK, until
from tests.standalone import free_port

PROJECT = Path(__file__).resolve().parents[2]
SECRET = "wJalrXUtnFEMIexample"


class LocalAirflow:
    """The process that `make airflow` runs, with a home and data of its own."""

    def __init__(self, folder, **environ):
        port = free_port()
        self.url, self.mark, self.data = f"http://127.0.0.1:{port}", uuid.uuid4().hex, folder / "data"
        self.environ = {
            **os.environ,
            "AIRFLOW_HOME": str(folder / "home"),
            "SOLARIS__STORAGE__ROOT": str(self.data),
            "AWS_SECRET_ACCESS_KEY": SECRET,
            # Leap days, for the backfill: there was none since the DAG's start, so no run comes unasked.
            "SOLARIS_REFRESH_CRON": "0 0 29 2 *",
            "PORT": str(port),
            MARK: self.mark,
            **environ,
        }
        self.home, self.output = folder / "home", folder / "output.txt"
        self.process: subprocess.Popen | None = None
        self.listening = set()

    def start(self):
        scripts = [str(PROJECT / "scripts" / name) for name in ("contained.py", "local_airflow.py")]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, scripts[0], sys.executable, scripts[1]],
                env=self.environ,
                cwd=PROJECT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until(lambda: "password:" in self.said() or self.process.poll() is not None, "not ready", 1800)
        assert self.process.poll() is None, self.said()
        self.password = re.search(r"password: (\S+)", self.said()).group(1)
        self.token = self.ask("/auth/token", {"username": "admin", "password": self.password})["access_token"]

    def said(self):
        return self.output.read_text()

    def ask(self, path, body=None, method=None):
        """The answer of the REST API."""
        headers = {"Content-Type": "application/json"}
        if getattr(self, "token", None):
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self.url + path, data, headers, method=method), timeout=60) as answer:
            return json.load(answer)

    def trigger(self, dag, **conf):
        self.ask(f"/api/v2/dags/{dag}", {"is_paused": False}, "PATCH")
        return self.ask(f"/api/v2/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})["dag_run_id"]

    def tasks(self, dag, run):
        found = self.ask(f"/api/v2/dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]
        return {task["task_id"]: (task["state"], task["try_number"]) for task in found}

    def wait_for(self, dag, run, seconds=1800):
        """The state in which the run ends. Until then `listening` gets what listens meanwhile."""
        path, deadline = f"/api/v2/dags/{dag}/dagRuns/{run}", time.monotonic() + seconds
        while (state := self.ask(path)["state"]) not in ("success", "failed"):
            assert time.monotonic() < deadline, f"{run} does not end"
            self.listening |= self.sockets()
            time.sleep(1)
        return state

    def wait_for_task(self, dag, run, task, states, seconds=900):
        """Waits until the task is in one of the states."""
        until(lambda: self.tasks(dag, run)[task][0] in states, f"{task} of {run} is not {states}", seconds)

    def logs(self, run, task=""):
        """What the run's tasks, or one of them, wrote to their logs."""
        files = sorted((self.home / "logs").rglob("*.log"))
        return "\n".join(file.read_text() for file in files if run in str(file) and task in str(file))

    def tree(self):
        """All its processes, also those that write their title over their environment, and so over the mark."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def applications(self, job=""):
        """Java processes whose command names the job, of whichever DAG run; all of them without a job."""
        java = (process for process in self.tree() if _quietly(process.name) == "java")
        return [process for process in java if job in " ".join(_quietly(process.cmdline) or ())]

    def sockets(self):
        """(name of the process, address, port) of every TCP socket on which a process of it listens."""
        return {
            (_quietly(process.name), socket.laddr.ip, socket.laddr.port)
            for process in self.tree()
            for socket in _quietly(process.net_connections, "tcp") or ()
            if socket.status == psutil.CONN_LISTEN
        }


def _quietly(ask, *arguments):
    """What a process says; None if it has ended."""
    try:
        return ask(*arguments)
    except psutil.NoSuchProcess:
        return None
