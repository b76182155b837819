"""What the SOLARIS DAGs share: the task of a job, the logical time of a run, the trigger form and the deadline.

Imports Airflow only, so that the DAG files parse anywhere; the jobs run in the Python that spark-submit starts. Where
they are and how they reach Spark comes from the environment of the Airflow processes:

| variable | default | what it is |
|---|---|---|
| `SOLARIS_HOME` | the folder above dags/ | the checkout: jobs/, conf/; in an image local:///opt/solaris |
| `SOLARIS_SPARK_CONN_ID` | `solaris_spark` | Airflow connection of type Spark: the master |
| `SOLARIS_SPARK_PROPERTIES` | spark-defaults.conf of spark-submit | properties file, for example conf/spark-yarn.conf |
| `SOLARIS_GPU_SPARK_CONN_ID`, `SOLARIS_GPU_SPARK_PROPERTIES` | as the two above | the same for the GPU pool |
| `SOLARIS_PY_FILES` | none | zip of the packages, where the executors have no installation |
| `SOLARIS_ARCHIVES` | none | environment of the executors, such as hdfs:///solaris/environment.tar.gz#environment |
| `SOLARIS_POOL` | `default_pool` | pool of all other tasks |
| `SOLARIS_GPU_POOL` | `solaris_gpu` | pool of the tasks that run the foundation model |
| `SOLARIS_CONFIG` | `conf/local.toml` | what the trigger form offers as config file |
| `SOLARIS_ALERT_URL` | none | webhook that is told of missed deadlines |
| `SOLARIS_DEADLINES` | `on` | `off`: no deadlines, as `airflow dags test` can't end a run that has one |
| `SOLARIS_REFRESH_CRON`, `SOLARIS_DAILY_CRON` | `0 * * * *`, `30 0 * * *` | schedules, UTC; empty: none |
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, DeadlineAlert, DeadlineReference, Param, SyncCallback, TriggerRule
from airflow.sdk.exceptions import AirflowFailException
from solaris_alerts import missed_deadline
from solaris_operator import SparkJobOperator

HOME = os.environ.get("SOLARIS_HOME") or str(Path(__file__).resolve().parents[1])
CONNECTION = os.environ.get("SOLARIS_SPARK_CONN_ID", "solaris_spark")
PROPERTIES = os.environ.get("SOLARIS_SPARK_PROPERTIES", "")
GPU_CONNECTION = os.environ.get("SOLARIS_GPU_SPARK_CONN_ID") or CONNECTION
GPU_PROPERTIES = os.environ.get("SOLARIS_GPU_SPARK_PROPERTIES") or PROPERTIES
PY_FILES = os.environ.get("SOLARIS_PY_FILES", "")
ARCHIVES = os.environ.get("SOLARIS_ARCHIVES", "")
CONFIG = os.environ.get("SOLARIS_CONFIG", "conf/local.toml")
POOL = os.environ.get("SOLARIS_POOL", "default_pool")
GPU_POOL = os.environ.get("SOLARIS_GPU_POOL", "solaris_gpu")
REFRESH_CRON = os.environ.get("SOLARIS_REFRESH_CRON", "0 * * * *") or None
DAILY_CRON = os.environ.get("SOLARIS_DAILY_CRON", "30 0 * * *") or None

TIME = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(Z|[+-]\d{2}:\d{2})$"
SETTING = r"^[a-z_]+\.[a-z_]+=.+$"

DEFAULTS: dict[str, Any] = {
    "owner": "solaris",
    "retries": 2,
    "retry_delay": timedelta(minutes=1),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=20),
    "execution_timeout": timedelta(hours=2),
}


def common_params() -> dict[str, Param]:
    """The part of the trigger form that every DAG has."""
    return {
        "as_of": Param(
            None,
            type=["null", "string"],
            pattern=TIME,
            title="as_of",
            description="Logical time of the run, with a zone: 2026-01-03T06:00:00Z. Empty: the end of the "
            "data interval of a scheduled run, the last full hour (UTC) of one triggered by hand.",
        ),
        "config": Param(
            CONFIG,
            type="string",
            minLength=1,
            pattern=r"^[^-]",
            title="Config file",
            description="TOML file, absolute or below SOLARIS_HOME.",
        ),
        "dataset": Param(
            None,
            type=["null", "string"],
            pattern=r"^[^-].*$",
            title="Dataset",
            description="Name of a mapping in conf/datasets, or the path of a mapping file. Empty: the config's own.",
        ),
        "settings": Param(
            None,
            type=["null", "array"],
            items={"type": "string", "pattern": SETTING},
            title="Further settings",
            description="One section.key=value a line, such as serving.ttl_hours=12. They win over the config file.",
        ),
        "dry_run": Param(
            False,
            type="boolean",
            title="Dry run",
            description="Check each command, its config and its Python on the worker, read and write nothing. Tasks "
            "end as skipped.",
        ),
    }


def budget_param() -> dict[str, Param]:
    """The budget of predict_pairs, in the trigger form."""
    return {
        "budget": Param(
            None,
            type=["null", "number"],
            exclusiveMinimum=0,
            title="Budget",
            description="What predict_pairs may spend, in the config's budget_unit (pairs). Empty: as configured.",
        )
    }


def as_of(params: Mapping[str, Any], dag_run: Any) -> str:
    """The logical time of a run, ISO 8601 in UTC; the Param of the same name as it is.

    A scheduled run and a backfill take the end of their data interval, which is their slice. A run triggered by hand
    or by an asset comes at any second and may have no interval: it takes the last full hour, so that slices line up.
    """
    if params.get("as_of"):
        return str(params["as_of"])
    moment = dag_run.data_interval_end or dag_run.logical_date or dag_run.run_after
    moment = moment.astimezone(UTC).replace(microsecond=0)
    if dag_run.run_type not in ("scheduled", "backfill"):
        moment = moment.replace(minute=0, second=0)
    return str(moment.strftime("%Y-%m-%dT%H:%M:%SZ"))


def arguments(params: Mapping[str, Any], dag_run: Any, job: str) -> list[str]:
    """The command line of a job file. Relative config and dataset paths are below SOLARIS_HOME."""
    settings = list(params.get("settings") or [])
    if params.get("dataset"):
        dataset = str(params["dataset"])
        settings.append(f"log.dataset={_below_home(dataset) if '/' in dataset else dataset}")
    if job == "predict_pairs" and params.get("budget"):
        settings.append(f"predict_pairs.budget={params['budget']}")
    config = _below_home(str(params["config"]))
    command = ["--as-of", as_of(params, dag_run), "--config", config, *(f"--set={setting}" for setting in settings)]
    return [*command, "--dry-run"] if params.get("dry_run") else command


def _below_home(path: str) -> str:
    return path if "://" in path or path.startswith("/") else f"{HOME.rstrip('/')}/{path}"


def check_time(context: Mapping[str, Any]) -> None:
    """Fails the task, without a retry, if its as_of is in the future: its slice would be written before it is known."""
    moment = as_of(context["params"], context["dag_run"])
    if datetime.fromisoformat(moment) > datetime.now(UTC):
        raise AirflowFailException(f"as_of {moment} is in the future; trigger again with a time that has passed")


def table(name: str) -> Asset:
    """The asset of a Delta table: updated by the task that writes it."""
    return Asset(name=f"solaris_{name}", uri=f"x-solaris://tables/{name}")


SNAPSHOT = Asset(name="solaris_snapshot", uri="x-solaris://snapshots/current")
FOUNDATION = Asset(name="solaris_foundation_model", uri="x-solaris://models/foundation")
VERIFIER = Asset(name="solaris_verifier_model", uri="x-solaris://models/verifier")
RELEASED = Asset(name="solaris_released_model", uri="x-solaris://models/released")


def job(name: str, outlets: Sequence[Asset] = (), *, gpu: bool = False, **options: Any) -> SparkJobOperator:
    """The task of a job: spark-submit of jobs/NAME.py. gpu: it runs the model. options go to the operator."""
    options.setdefault("pre_execute", check_time)
    options.setdefault("trigger_rule", TriggerRule.NONE_FAILED)  # the tasks of a dry run are skipped
    return SparkJobOperator(
        task_id=name,
        application=_below_home(f"jobs/{name}.py"),
        application_args=f"{{{{ arguments(params, dag_run, '{name}') }}}}",  # a list, as templates render natively
        name=f"solaris_{name}",
        pool=GPU_POOL if gpu else POOL,
        conn_id=GPU_CONNECTION if gpu else CONNECTION,
        properties_file=(GPU_PROPERTIES if gpu else PROPERTIES) or None,
        py_files=PY_FILES or None,
        archives=ARCHIVES or None,
        outlets=list(outlets),
        **options,
    )


def dag(dag_id: str, doc: str | None, params: Mapping[str, Param], deadline: timedelta, **options: Any) -> DAG:
    """A DAG of the pipeline: one run at a time, no catch-up, the runbook as its documentation.

    deadline: how long after being queued a run should have ended; one that has not raises an alert, nothing more.
    """
    text = (doc or "").strip()
    alert = DeadlineAlert(
        name=f"{dag_id} takes too long",
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=deadline,
        callback=SyncCallback(missed_deadline, {"minutes": deadline.total_seconds() / 60}),
    )
    return DAG(
        dag_id=dag_id,
        description=text.splitlines()[0],
        doc_md=text,
        default_args=DEFAULTS,
        params=dict(params),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        deadline=None if os.environ.get("SOLARIS_DEADLINES") == "off" else alert,
        max_active_runs=1,
        render_template_as_native_obj=True,
        user_defined_macros={"arguments": arguments},
        tags=["solaris", *options.pop("tags", ())],
        **options,
    )
