"""The DAG files as Airflow sees them, read in a Python of their own with an empty Airflow home."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import JOBS
from jobs.common.clock import parse_as_of

PROJECT = Path(__file__).resolve().parents[2]
ORDER = {
    "solaris_refresh": [
        "ingest_log",
        "update_histories",
        "predict_pairs",
        "embed_pairs",
        "aggregate_users",
        "find_neighbors",
        "export_snapshot",
    ],
    "solaris_daily": ["train_verifier", "maintain_tables"],
    "solaris_evaluate": ["train_foundation", "join_features", "evaluate_uplift"],
}


def describe(home, **more):
    """What describe.py says of the DAGs, read with nothing but these SOLARIS variables."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "SOLARIS"))}
    environ |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONPATH": "",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        **more,
    }
    done = subprocess.run(
        [sys.executable, str(PROJECT / "tests" / "dags" / "describe.py"), str(PROJECT / "dags")],
        env=environ,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("RESULT", 1)[1])


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    return describe(tmp_path_factory.mktemp("airflow"))


@pytest.mark.slow
def test_jobs_in_an_image_and_gpu_nodes_of_their_own_are_a_matter_of_the_environment(tmp_path, described):
    found = describe(
        tmp_path,
        SOLARIS_HOME="local:///opt/solaris/",
        SOLARIS_CONFIG="/etc/solaris/production.toml",
        SOLARIS_SPARK_PROPERTIES="/etc/solaris/cpu.conf",
        SOLARIS_GPU_SPARK_CONN_ID="solaris_gpus",
        SOLARIS_GPU_SPARK_PROPERTIES="/etc/solaris/gpu.conf",
    )
    gpu = {"embed_pairs", "train_foundation"}
    for dag in found["dags"].values():
        for name, task in dag["tasks"].items():
            command = task["commands"]["scheduled"]
            assert command[0] == f"local:///opt/solaris/jobs/{name}.py"
            assert command[command.index("--config") + 1] == "/etc/solaris/production.toml"
            where = (
                ("solaris_gpus", "/etc/solaris/gpu.conf") if name in gpu else ("solaris_spark", "/etc/solaris/cpu.conf")
            )
            assert (task["conn_id"], task["properties"]) == where
    tasks = [task for dag in described["dags"].values() for task in dag["tasks"].values()]
    assert {(task["conn_id"], task["properties"]) for task in tasks} == {("solaris_spark", None)}  # one for all


@pytest.mark.slow
def test_all_dags_parse_without_importing_spark_torch_or_us(described):
    assert described["errors"] == {}
    assert set(described["dags"]) == set(ORDER)
    assert described["heavy"] == []


def test_tasks_are_jobs_with_owner_retries_and_timeouts_in_the_right_order(described):
    tasks = {name: task for dag in described["dags"].values() for name, task in dag["tasks"].items()}
    assert sum(len(dag["tasks"]) for dag in described["dags"].values()) == len(tasks)
    assert set(tasks) == set(JOBS) - {"make_world", "simulate_ab"}
    for name, task in tasks.items():
        assert task["owner"] == "solaris" and task["retries"] == 2 and task["backoff"] == 2, name
        assert 0 < task["timeout"] <= 12 * 3600, name
        assert task["pool"] == ("solaris_gpu" if name in ("embed_pairs", "train_foundation") else "default_pool"), name
        assert Path(task["filled"][0]) == PROJECT / "jobs" / f"{name}.py" and Path(task["filled"][0]).exists()
    for dag, order in ORDER.items():
        assert [name for name in described["dags"][dag]["order"] if name in order] == order
    assert tasks["export_snapshot"]["upstream"] == ["audit_coverage", "find_neighbors"]
    assert tasks["maintain_tables"]["upstream"] == ["train_verifier"]
    assert tasks["join_features"]["trigger_rule"] == "none_failed"
    assert tasks["export_snapshot"]["outlets"] == ["x-solaris://snapshots/current", "x-solaris://tables/snapshots"]
    assert tasks["embed_pairs"]["outlets"] == ["x-solaris://tables/pair_embeddings"]


def test_every_dag_has_a_runbook_tags_one_run_at_a_time_and_no_catch_up(described):
    for name, dag in described["dags"].items():
        assert "## What it does" in dag["doc"] and "## When something fails" in dag["doc"], name
        assert "solaris" in dag["tags"] and dag["max_active_runs"] == 1 and dag["catchup"] is False, name
        assert all(dag["described"].values())
        assert {"as_of", "config", "dataset", "settings", "dry_run"} <= set(dag["described"])
        assert dag["deadline"] == {"solaris_refresh": 55, "solaris_daily": 8 * 60, "solaris_evaluate": 24 * 60}[name]
        assert dag["alert"] == "solaris_alerts.missed_deadline"


@pytest.mark.parametrize(
    ("kind", "as_of"),
    [
        ("scheduled", "2026-01-03T06:00:00Z"),
        ("backfill", "2026-01-02T00:30:00Z"),
        ("manual", "2026-01-03T06:00:00Z"),
        ("without_interval", "2026-01-03T06:00:00Z"),
        ("asset_triggered", "2026-01-03T06:00:00Z"),
    ],
)
def test_every_command_has_the_logical_time_with_its_zone(described, kind, as_of):
    for dag in described["dags"].values():
        for name, task in dag["tasks"].items():
            expected = ["--as-of", as_of, "--config", str(PROJECT / "conf" / "local.toml")]
            assert task["commands"][kind][1:] == expected, name
            assert parse_as_of(as_of)


def test_params_reach_the_command_line(described):
    tasks = {name: task["filled"] for dag in described["dags"].values() for name, task in dag["tasks"].items()}
    base = [
        "--as-of",
        "2026-01-01T00:00:00+05:30",
        "--config",
        "/etc/solaris.toml",
        "--set=serving.ttl_hours=12",
        f"--set=log.dataset={PROJECT / 'own' / 'log.toml'}",
    ]
    assert tasks["ingest_log"][1:] == base
    assert tasks["predict_pairs"][1:] == [*base, "--set=predict_pairs.budget=5000"]


def test_a_dry_run_reaches_every_command(described):
    for dag in described["dags"].values():
        for name, task in dag["tasks"].items():
            assert task["dry_run"] == [*task["commands"]["scheduled"], "--dry-run"], name
            assert task["trigger_rule"] == "none_failed", name  # the tasks before it end as skipped


def test_the_trigger_form_refuses_what_does_not_validate(described):
    for name, dag in described["dags"].items():
        wrong = {"as_of without a zone", "a flag as config", "a setting without a value", "no budget"}
        assert {case for case, good in dag["valid"].items() if not good} == wrong & set(dag["valid"]), name


def test_a_released_model_is_evaluated_and_not_trained_over(described):
    checks = described["checks"]
    assert checks["training on demand"] == "ran"
    assert checks["training off"].startswith("AirflowSkipException")
    assert checks["training of a released model"].startswith("AirflowSkipException")
    assert checks["join of a released model"] == "ran"


def test_a_time_in_the_future_fails_without_a_retry(described):
    assert described["checks"]["the future"] == (
        "AirflowFailException: as_of 2999-01-01T00:00:00Z is in the future; trigger again with a time that has passed"
    )


def test_dag_files_import_nothing_of_the_packages():
    ours = re.compile(r"^\s*(from|import) (jobs|schemas|solaris_udf|pyspark|torch)\b", re.MULTILINE)
    for path in (PROJECT / "dags").glob("*.py"):
        assert not ours.search(path.read_text(encoding="utf-8")), path
