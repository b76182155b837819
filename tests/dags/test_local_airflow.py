"""`make airflow` as a person uses it: log in, trigger a run with a Param, see it turn green; and what is left of it."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import pytest

from jobs.common.config import load_config
from tests.dags.local_airflow import PROJECT, SECRET, LocalAirflow
from tests.dags.webhook import webhook
from tests.processes import marked, until
from tests.test_pipeline import contents

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


@pytest.fixture(scope="module")
def alerts():
    """(url, what it was sent) of a webhook that is told of missed deadlines."""
    with webhook(200) as found:
        yield found


@pytest.fixture(scope="module")
def airflow(tmp_path_factory, alerts):
    local = LocalAirflow(tmp_path_factory.mktemp("airflow"), SOLARIS_ALERT_URL=alerts[0])
    local.start()
    yield local
    local.process.kill()
    local.process.wait()
    until(lambda: not marked(local.mark), "processes are left", 60)


@pytest.fixture
def finished(airflow):
    """The id of a run of solaris_refresh that is green: the one that a person triggered, or one of its own."""
    found = airflow.ask("/api/v2/dags/solaris_refresh/dagRuns?state=success")["dag_runs"]
    run = found[0]["dag_run_id"] if found else airflow.trigger("solaris_refresh", budget=300)
    assert airflow.wait_for("solaris_refresh", run) == "success"
    return run


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


def test_cleared_tasks_write_the_same_rows_and_the_same_snapshot(airflow, finished, spark):
    config = load_config([PROJECT / "conf" / "airflow.toml"], [f"storage.root={airflow.data}"], environ={})

    def stored():
        snapshots = airflow.data / "snapshots"
        files = {path.relative_to(snapshots): path.read_bytes() for path in snapshots.rglob("*") if path.is_file()}
        return files, [contents(spark, config, name) for name in ("pair_embeddings", "rejected_rows", "snapshots")]

    before = stored()
    assert before[1][0].num_rows and Path("CURRENT") in before[0]
    again = {"task_ids": ["embed_pairs", "export_snapshot"], "dag_run_id": finished}
    clear = {**again, "dry_run": False, "only_failed": False}
    airflow.ask("/api/v2/dags/solaris_refresh/clearTaskInstances", clear)
    assert airflow.wait_for("solaris_refresh", finished) == "success"
    tasks = airflow.tasks("solaris_refresh", finished)
    assert {task: tries for task, (_, tries) in tasks.items() if tries > 1} == {"embed_pairs": 2, "export_snapshot": 2}
    assert {state for state, _ in tasks.values()} == {"success"}
    assert stored() == before


def test_a_failed_audit_holds_the_export_back_and_its_log_says_why(airflow, finished):
    """Only the audit of this run is to run: the other tasks are set to success while the DAG is paused."""
    path = "/api/v2/dags/solaris_refresh"
    live = (airflow.data / "snapshots" / "CURRENT").read_text()
    airflow.ask(path, {"is_paused": True}, "PATCH")
    conf = {"settings": ["audit_coverage.min_coverage=1.0", "quality.min_rows_for_rate=1"]}
    run = airflow.ask(f"{path}/dagRuns", {"logical_date": None, "conf": conf})["dag_run_id"]
    for task in REFRESH - {"audit_coverage", "export_snapshot"}:
        airflow.ask(f"{path}/dagRuns/{run}/taskInstances/{task}", {"new_state": "success"}, "PATCH")
    airflow.ask(path, {"is_paused": False}, "PATCH")
    airflow.wait_for_task("solaris_refresh", run, "audit_coverage", ["up_for_retry", "failed"])
    assert airflow.tasks("solaris_refresh", run)["export_snapshot"][0] is None
    assert "is below audit_coverage.min_coverage = 1.0; the audit is written" in airflow.logs(run, "audit_coverage")
    # Its two retries would say the same, minutes later.
    airflow.ask(f"{path}/dagRuns/{run}/taskInstances/audit_coverage", {"new_state": "failed"}, "PATCH")
    assert airflow.wait_for("solaris_refresh", run) == "failed"
    assert airflow.tasks("solaris_refresh", run)["export_snapshot"][0] == "upstream_failed"
    assert (airflow.data / "snapshots" / "CURRENT").read_text() == live


def test_an_event_of_a_released_model_starts_an_evaluation_without_training(airflow):
    path = "/api/v2/dags/solaris_evaluate"
    airflow.ask(path, {"is_paused": False}, "PATCH")
    (asset,) = airflow.ask("/api/v2/assets?name_pattern=solaris_released_model")["assets"]
    airflow.ask("/api/v2/assets/events", {"asset_id": asset["id"]})
    until(lambda: airflow.ask(f"{path}/dagRuns")["total_entries"], "no run came of the event")
    (run,) = airflow.ask(f"{path}/dagRuns")["dag_runs"]
    assert run["run_type"] == "asset_triggered"
    airflow.wait_for_task("solaris_evaluate", run["dag_run_id"], "join_features", ["running", "success", "failed"])
    tasks = airflow.tasks("solaris_evaluate", run["dag_run_id"])
    assert tasks["train_foundation"] == ("skipped", 1) and tasks["join_features"] == ("running", 1)
    # That it evaluates is seen below, without a scheduler.
    airflow.ask(f"{path}/dagRuns/{run['dag_run_id']}", {"state": "failed"}, "PATCH")
    until(lambda: not airflow.applications(), "the tasks of a run that was failed by hand go on")


def test_a_mistake_fails_once_with_the_jobs_own_line_and_no_credential_in_the_log(airflow):
    run = airflow.trigger("solaris_refresh", settings=[f"log.path=/nowhere/{SECRET}"])
    assert airflow.wait_for("solaris_refresh", run) == "failed"
    tasks = airflow.tasks("solaris_refresh", run)
    assert tasks["ingest_log"] == ("failed", 1)
    assert tasks["export_snapshot"][0] == "upstream_failed"
    text = airflow.logs(run)
    assert "Error code is: 2." in text and "/nowhere/***" in text
    assert SECRET not in text
    assert airflow.ask("/api/v2/dags/~/dagRuns/~/taskInstances/~/xcomEntries")["total_entries"] == 0


def test_runs_of_a_paused_dag_wait_and_then_run_once_and_who_waits_too_long_is_told(airflow, alerts):
    """What a paused DAG would have done is not lost: its runs are queued, and their jobs read what is there by then."""
    path = "/api/v2/dags/solaris_daily"
    airflow.ask(path, {"is_paused": True}, "PATCH")
    body = {"logical_date": None, "conf": {"dry_run": True}}
    waiting = airflow.ask(f"{path}/dagRuns", body)["dag_run_id"]
    other = airflow.trigger("solaris_refresh", dry_run=True)
    assert airflow.wait_for("solaris_refresh", other) == "success"
    assert {state for state, _ in airflow.tasks("solaris_refresh", other).values()} == {"skipped"}
    assert airflow.ask(f"{path}/dagRuns/{waiting}")["state"] == "queued"
    # As if its eight hours were over.
    with closing(sqlite3.connect(airflow.home / "airflow.db", timeout=60)) as database, database:
        of_run = "WHERE dagrun_id = (SELECT id FROM dag_run WHERE run_id = ?)"
        moved = database.execute(f"UPDATE deadline SET deadline_time = '2026-01-01 00:00:00' {of_run}", [waiting])
        assert moved.rowcount == 1
    until(lambda: alerts[1], "the webhook was not called", 300)
    text = f"solaris_daily {waiting} has not ended 480 minutes after it was queued; see its graph in Airflow"
    assert alerts[1] == [("application/json", {"text": text})]
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


def test_everything_that_listens_does_so_on_this_machine_alone(airflow, finished):
    """Every TCP socket of Airflow's and Spark's processes that was seen while runs went on above."""
    seen = airflow.listening | airflow.sockets()
    assert ("java" in {name for name, *_ in seen}) and int(airflow.url.rsplit(":", 1)[1]) in {port for *_, port in seen}

    def loopback(text):
        address = ip_address(text)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    assert not {each for each in seen if not loopback(each[1])}


def test_deleting_a_running_task_and_killing_the_parent_leave_no_process(airflow):
    run = airflow.trigger("solaris_daily")
    until(lambda: airflow.applications("train_verifier"), "no Spark application was started")
    path = f"/api/v2/dags/solaris_daily/dagRuns/{run}/taskInstances/train_verifier"
    airflow.ask(path, {"new_state": "failed"}, "PATCH")
    until(lambda: not airflow.applications("train_verifier"), "a task that was failed by hand goes on")

    airflow.trigger("solaris_refresh")
    until(lambda: airflow.applications("ingest_log"), "no Spark application was started")
    tree = airflow.tree()
    airflow.process.send_signal(signal.SIGKILL)
    airflow.process.wait()
    until(lambda: not (marked(airflow.mark) or [each for each in tree if each.is_running()]), "processes are left", 60)


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
