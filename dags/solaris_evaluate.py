"""Measures what the embeddings are worth to a small online model, and trains the reference foundation model first.

## What it does
`train_foundation` → `join_features` → `evaluate_uplift`. Training rows get what the snapshot live at their time would
have served, then the small model is trained with and without the embeddings on identical rows; figures with their
intervals go to `vm_evaluations` and the report.

## When it runs
On demand, and when the asset `solaris_released_model` is updated: whoever puts a model of their own below
`models/foundation/` creates an event of that asset, in the UI or with
`POST /api/v2/assets/events`. Such a run skips `train_foundation`.

The figures are of the model version that served most rows of the last `evaluate_uplift.train_hours` + `eval_hours`,
and of rows after its training. A model that was released or trained just now has served none: trigger once more when
it has served that long.

## Parameters
`train` off trains no new model. `as_of` is the logical time, by default the last full hour. `dataset`,
`config` and `settings` choose and override the configuration, for example `evaluate_uplift.seeds=5`.

## When something fails
Clear the failed task; each replaces its own slice. Exit code 2 is a mistake in input or config and says how to fix it.
"""

from datetime import timedelta
from typing import Any

from airflow.sdk import Param, TriggerRule, chain
from airflow.sdk.exceptions import AirflowSkipException
from solaris_common import FOUNDATION, RELEASED, check_time, common_params, dag, job, table

TRAIN = Param(
    True,
    type="boolean",
    title="Train the reference model",
    description="Off: no new foundation model below models/foundation/.",
)


def check_training(context: dict[str, Any]) -> None:
    """Skips training if the run is not meant to train: Param train is off, or a released model triggered it."""
    check_time(context)
    if not context["params"]["train"] or context["dag_run"].run_type == "asset_triggered":
        raise AirflowSkipException("no new foundation model is wanted: evaluating what served")


PARAMS = {"train": TRAIN, **common_params()}

with dag("solaris_evaluate", __doc__, PARAMS, timedelta(hours=24), schedule=[RELEASED], tags=["evaluation"]):
    train = job(
        "train_foundation",
        [FOUNDATION],
        gpu=True,
        pre_execute=check_training,
        execution_timeout=timedelta(hours=12),
    )
    join = job("join_features", [table("training_rows")], trigger_rule=TriggerRule.NONE_FAILED)
    evaluate = job("evaluate_uplift", [table("vm_evaluations")], execution_timeout=timedelta(hours=12))

    chain(train, join, evaluate)
