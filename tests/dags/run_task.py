"""Run by test_operator.py in a Python of its own: one task, executed as Airflow's task process does it.

run_task.py APPLICATION [OPTION=VALUE...]     prints what became of it as JSON
"""

import json
import signal
import sys

from airflow.sdk.execution_time.timeout import timeout
from solaris_operator import SparkJobOperator

options = dict(option.split("=", 1) for option in sys.argv[2:])
dry_run = bool(options.pop("dry_run", ""))
task = SparkJobOperator(task_id="task", application=sys.argv[1], **{"conn_id": "solaris_spark", **options})
signal.signal(signal.SIGTERM, lambda *_: task.on_kill())  # as airflow.sdk.execution_time.task_runner does
try:
    with timeout(3600):
        task.execute({"params": {"dry_run": dry_run}})
    outcome = ["success", ""]
except BaseException as error:
    if type(error).__name__ == "AirflowTaskTimeout":
        task.on_kill()  # so does the task runner
    outcome = [type(error).__name__, str(error)]
print("RESULT" + json.dumps(outcome))
