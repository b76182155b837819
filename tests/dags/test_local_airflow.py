"""`make airflow` as a person uses it: log in, trigger a run with a Param, see it turn green; and what is left of it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.processes import MARK, marked, until

PROJECT = Path(__file__).resolve().parents[2]
SECRET = "wJalrXUtnFEMIexample"
REFRESH = {
    "ingest_log",
    "update_histories",
    "audit_coverage",
    "predict_pairs",
    "embed_pairs",
    "aggregate_users",
    "find_neighbors",
    "export_snapshot",
}

pytestmark = [pytest.mark.long, pytest.mark.e2e]


class LocalAirflow:
    """The process that `make airflow` runs, with a home and data of its own."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
        }
        self.home, self.output = folder / "home", folder / "output.txt"
        self.process: subprocess.Popen | None = None

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
        """The state in which the run ends."""
        path = f"/api/v2/dags/{dag}/dagRuns/{run}"
        until(lambda: self.ask(path)["state"] in ("success", "failed"), f"{run} does not end", seconds)
        return self.ask(path)["state"]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    local = LocalAirflow(tmp_path_factory.mktemp("airflow"))
    local.start()
    yield local
    local.process.kill()
    local.process.wait()
    until(lambda: not marked(local.mark), "processes are left", 60)


@pytest.fixture
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1500,1100"):
        options.add_argument(f"--{argument}")
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.implicitly_wait(60)
    yield found
    found.quit()


def test_a_person_triggers_a_run_with_a_param_and_sees_it_turn_green(airflow, browser, tmp_path):
    def find(selector):
        return browser.find_element("css selector", selector)

    def submit():
        button = find("[data-testid=trigger-dag-submit]")
        browser.execute_script("arguments[0].scrollIntoView()", button)
        until(button.is_enabled, "the form can't be sent")
        button.click()

    browser.get(f"{airflow.url}/dags/solaris_refresh")
    find("[name=username]").send_keys("admin")
    find("[name=password]").send_keys(airflow.password)
    find("button[type=submit]").click()
    find("[data-testid=trigger-dag-button]").click()
    # What does not validate is refused, and the form says why.
    find("#element_as_of").send_keys("yesterday")
    submit()
    until(lambda: "Invalid input for param as_of" in find("body").text, "the form says nothing")
    assert airflow.ask("/api/v2/dags/solaris_refresh/dagRuns")["total_entries"] == 0

    browser.refresh()
    find("[data-testid=trigger-dag-button]").click()
    find("[name=element_budget]").send_keys("300")
    submit()
    path = "/api/v2/dags/solaris_refresh/dagRuns"
    until(lambda: airflow.ask(path)["total_entries"], "no run came of it")
    (run,) = [found for found in airflow.ask(path)["dag_runs"] if found["run_type"] == "manual"]
    assert run["conf"]["budget"] == 300
    browser.get("about:blank")  # a page that refreshes itself takes a good part of a core
    state = airflow.wait_for("solaris_refresh", run["dag_run_id"])
    assert airflow.tasks("solaris_refresh", run["dag_run_id"]) == dict.fromkeys(REFRESH, ("success", 1)), state
    assert state == "success"

    browser.get(f"{airflow.url}/dags/solaris_refresh/runs/{run['dag_run_id']}")
    find("[aria-label^='Show Graph']").click()
    find(".react-flow__node")
    nodes = browser.find_elements("css selector", ".react-flow__node")
    assert {node.get_attribute("data-testid") for node in nodes} == {f"rf__node-{task}" for task in REFRESH}
    until(lambda: all("success" in node.text for node in nodes), f"not green: {[node.text for node in nodes]}")
    picture = Path(os.environ.get("SOLARIS_SCREENSHOT") or tmp_path / "graph.png")
    assert browser.save_screenshot(str(picture))


def test_a_mistake_fails_once_with_the_jobs_own_line_and_no_credential_in_the_log(airflow):
    run = airflow.trigger("solaris_refresh", settings=[f"log.path=/nowhere/{SECRET}"])
    assert airflow.wait_for("solaris_refresh", run) == "failed"
    tasks = airflow.tasks("solaris_refresh", run)
    assert tasks["ingest_log"] == ("failed", 1)
    assert tasks["export_snapshot"][0] == "upstream_failed"
    logs = [path.read_text() for path in (airflow.home / "logs").rglob("*.log") if run in str(path)]
    text = "\n".join(logs)
    assert "Error code is: 2." in text and "/nowhere/***" in text
    assert SECRET not in text
    assert airflow.ask("/api/v2/dags/~/dagRuns/~/taskInstances/~/xcomEntries")["total_entries"] == 0


def test_runs_of_a_paused_dag_wait_and_then_run_once(airflow):
    """What a paused DAG would have done is not lost: its runs are queued, and their jobs read what is there by then."""
    path = "/api/v2/dags/solaris_daily"
    airflow.ask(path, {"is_paused": True}, "PATCH")
    body = {"logical_date": None, "conf": {"dry_run": True}}
    waiting = airflow.ask(f"{path}/dagRuns", body)["dag_run_id"]
    other = airflow.trigger("solaris_refresh", dry_run=True)
    assert airflow.wait_for("solaris_refresh", other) == "success"
    assert {state for state, _ in airflow.tasks("solaris_refresh", other).values()} == {"skipped"}
    assert airflow.ask(f"{path}/dagRuns/{waiting}")["state"] == "queued"
    airflow.ask(path, {"is_paused": False}, "PATCH")
    assert airflow.wait_for("solaris_daily", waiting) == "success"
    assert airflow.ask(f"{path}/dagRuns")["total_entries"] == 1
    assert {state for state, _ in airflow.tasks("solaris_daily", waiting).values()} == {"skipped"}


def test_a_backfill_runs_each_slice_once_and_in_order(airflow):
    wanted = {"from_date": "2016-01-01T00:00:00Z", "to_date": "2021-01-01T00:00:00Z", "run_backwards": False}
    how = {"dag_run_conf": {"dry_run": True}, "max_active_runs": 1, "reprocess_behavior": "none"}
    airflow.ask("/api/v2/dags/solaris_refresh", {"is_paused": False}, "PATCH")
    airflow.ask("/api/v2/backfills", {"dag_id": "solaris_refresh", **wanted, **how})

    def runs():
        found = airflow.ask("/api/v2/dags/solaris_refresh/dagRuns?limit=100")["dag_runs"]
        return sorted((run for run in found if run["run_type"] == "backfill"), key=lambda run: run["logical_date"])

    until(lambda: [run["state"] for run in runs()] == ["success", "success"], f"not done: {runs()}", 600)
    first, second = runs()
    assert first["end_date"] <= second["start_date"]
    for run, end in ((first, "2016-02-29T00:00:00Z"), (second, "2020-02-29T00:00:00Z")):
        tasks = airflow.tasks("solaris_refresh", run["dag_run_id"])
        assert tasks == dict.fromkeys(REFRESH, ("skipped", 1))
        path = f"/api/v2/dags/solaris_refresh/dagRuns/{run['dag_run_id']}/taskInstances/export_snapshot"
        assert airflow.ask(path)["rendered_fields"]["application_args"][:2] == ["--as-of", end]


def test_deleting_a_running_task_and_killing_the_parent_leave_no_process(airflow):
    def sparks():
        return [process for process in marked(airflow.mark) if process.name() == "java"]

    run = airflow.trigger("solaris_daily")
    until(sparks, "no Spark application was started")
    path = f"/api/v2/dags/solaris_daily/dagRuns/{run}/taskInstances/train_verifier"
    airflow.ask(path, {"new_state": "failed"}, "PATCH")
    until(lambda: not sparks(), "a task that was failed by hand goes on")

    airflow.trigger("solaris_refresh")
    until(sparks, "no Spark application was started")
    airflow.process.send_signal(signal.SIGKILL)
    airflow.process.wait()
    until(lambda: not marked(airflow.mark), "processes are left", 60)


@pytest.mark.parametrize("dag", ["solaris_refresh", "solaris_daily", "solaris_evaluate"])
def test_each_dag_runs_through_without_a_scheduler(airflow, dag):
    """After the others: the server is down by then, its database and data stay."""
    environ = {
        **airflow.environ,
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "SOLARIS_CONFIG": "conf/airflow.toml",
        "SOLARIS_DEADLINES": "off",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "airflow", "dags", "test", dag],
        env=environ,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{dag}: {time.monotonic() - started:.0f} s")
    assert done.returncode == 0 and "state=success" in done.stdout + done.stderr, (done.stdout + done.stderr)[-3000:]
