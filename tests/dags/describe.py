"""Run by test_dags.py in a Python of its own: what the DAG files hold, as JSON."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk import Param, ParamsDict

WATCHED = ("pyspark", "torch", "faiss", "pandas", "jobs", "schemas", "solaris_udf")


def dag_run(run_type, *, end=None, logical=None):
    return SimpleNamespace(
        run_type=run_type,
        data_interval_end=end,
        logical_date=logical,
        run_after=datetime(2026, 1, 3, 6, 17, 23, 456789, UTC),
    )


HOUR = datetime(2026, 1, 3, 6, tzinfo=UTC)
AT = datetime(2026, 1, 3, 6, 17, 23, 456789, UTC)
RUNS = {
    "scheduled": dag_run("scheduled", end=HOUR, logical=HOUR),
    "backfill": dag_run("backfill", end=datetime(2026, 1, 2, 0, 30, tzinfo=UTC), logical=HOUR),
    "manual": dag_run("manual", end=AT, logical=AT),
    "without_interval": dag_run("manual"),
    "asset_triggered": dag_run("asset_triggered"),
}
FILLED = {
    "as_of": "2026-01-01T00:00:00+05:30",
    "config": "/etc/solaris.toml",
    "dataset": "own/log.toml",
    "budget": 5000,
    "settings": ["serving.ttl_hours=12"],
}


def command(dag, task, run, params):
    """The rendered command line of a task: its application and arguments."""
    context = {"params": params, "dag_run": run, **dag.user_defined_macros}
    fresh = task.prepare_for_execution()
    fresh.render_template_fields(context)
    return [fresh.application, *fresh.application_args]


def outcome(check, run, params):
    try:
        check({"params": params, "dag_run": run})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def valid(dag, **values):
    """Whether the trigger form takes the values."""
    known = {name: dag.params.get_param(name) for name in dag.params}
    merged = ParamsDict({name: Param(values.get(name, param.value), **param.schema) for name, param in known.items()})
    try:
        merged.validate()
    except Exception:
        return False
    return True


bag = BundleDagBag(sys.argv[1], bundle_path=Path(sys.argv[1]), bundle_name="solaris")
dags = {}
for name, dag in bag.dags.items():
    defaults = dag.params.dump()
    dags[name] = {
        "file": dag.fileloc,
        "tags": sorted(dag.tags),
        "doc": dag.doc_md,
        "catchup": dag.catchup,
        "max_active_runs": dag.max_active_runs,
        "order": [task.task_id for task in dag.topological_sort()],
        "deadline": dag.deadline[0].interval.total_seconds() / 60,
        "alert": dag.deadline[0].callback.path,
        "described": {key: bool(dag.params.get_param(key).description) for key in dag.params},
        "tasks": {
            task.task_id: {
                "owner": task.owner,
                "retries": task.retries,
                "backoff": task.retry_exponential_backoff,
                "timeout": task.execution_timeout.total_seconds(),
                "pool": task.pool,
                "conn_id": task._conn_id,
                "properties": task.properties_file,
                "trigger_rule": task.trigger_rule.value,
                "upstream": sorted(task.upstream_task_ids),
                "outlets": sorted(asset.uri for asset in task.outlets),
                "commands": {kind: command(dag, task, run, defaults) for kind, run in RUNS.items()},
                "dry_run": command(dag, task, RUNS["scheduled"], {**defaults, "dry_run": True}),
                "filled": command(dag, task, RUNS["scheduled"], {**defaults, **FILLED}),
            }
            for task in dag.tasks
        },
        "valid": {
            "defaults": valid(dag),
            "as_of": valid(dag, as_of="2026-01-03T06:00:00Z"),
            "as_of without a zone": valid(dag, as_of="2026-01-03T06:00:00"),
            "a flag as config": valid(dag, config="--master"),
            "a setting without a value": valid(dag, settings=["serving.ttl_hours"]),
            "settings": valid(dag, settings=["serving.ttl_hours=12", "log.dataset=x"]),
            **({"budget": valid(dag, budget=9), "no budget": valid(dag, budget=0)} if "budget" in dag.params else {}),
        },
    }
evaluate = bag.dags["solaris_evaluate"]
training = evaluate.get_task("train_foundation")._pre_execute_hook
other = evaluate.get_task("join_features")._pre_execute_hook
defaults = evaluate.params.dump()
print(
    "RESULT"
    + json.dumps(
        {
            "errors": bag.import_errors,
            "dags": dags,
            "heavy": [name for name in WATCHED if name in sys.modules],
            "checks": {
                "training on demand": outcome(training, RUNS["manual"], defaults),
                "training off": outcome(training, RUNS["manual"], {**defaults, "train": False}),
                "training of a released model": outcome(training, RUNS["asset_triggered"], defaults),
                "join of a released model": outcome(other, RUNS["asset_triggered"], defaults),
                "the future": outcome(other, RUNS["manual"], {**defaults, "as_of": "2999-01-01T00:00:00Z"}),
            },
        }
    )
)
