"""SparkJobOperator with the real provider and a real spark-submit: failures, and kills that leave nothing running."""

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import MARK, marked, until

PROJECT = Path(__file__).resolve().parents[2]
DRY = "print('checked'); raise SystemExit(0)"
SLEEPS = """
import time
from pathlib import Path
from pyspark.sql import SparkSession

spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()

def work(rows):
    Path(__file__).with_suffix(".working").touch()
    time.sleep(600)
    return rows

spark.sparkContext.parallelize([1], 1).mapPartitions(work).collect()
"""


class Task:
    """A task process, and every process that it started: they inherit a mark in their environment."""

    def __init__(self, folder, code, *options, **environ):
        self.mark, self.script = uuid.uuid4().hex, folder / "application.py"
        self.script.write_text(code)
        environ = {
            **os.environ,
            "AIRFLOW_HOME": str(folder / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "PYTHONPATH": str(PROJECT / "dags"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "AIRFLOW_CONN_SOLARIS_SPARK": '{"conn_type": "spark", "host": "local[1]"}',
            MARK: self.mark,
            **environ,
        }
        command = [sys.executable, str(PROJECT / "tests" / "dags" / "run_task.py"), str(self.script), *options]
        self.process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def outcome(self):
        output, _ = self.process.communicate(timeout=400)
        assert "RESULT" in output, output[-3000:]
        return json.loads(output.rsplit("RESULT", 1)[1].splitlines()[0])

    def processes(self):
        return marked(self.mark)

    def wait_until_working(self):
        working = self.script.with_suffix(".working")
        until(lambda: working.exists() or self.process.poll() is not None, "the Python worker has not started", 400)
        assert self.process.poll() is None, self.process.stdout.read()[-3000:]

    def kill(self):
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def test_a_connection_that_does_not_exist_fails_at_once_and_says_how_to_make_it(tmp_path):
    kind, message = Task(tmp_path, "", "conn_id=nowhere").outcome()
    assert kind == "AirflowFailException"  # no retry
    assert message.startswith("there is no Airflow connection 'nowhere'; create it: airflow connections add nowhere")


def test_exit_code_2_is_not_tried_again_and_1_is_and_both_carry_the_last_lines(tmp_path):
    mistake = "import sys\nprint('error: item 7 has no price', file=sys.stderr)\nsys.exit(2)"
    tasks = []
    for name, code in {"two": mistake, "one": mistake.replace("exit(2)", "exit(1)")}.items():
        (tmp_path / name).mkdir()
        tasks.append(Task(tmp_path / name, code))
    (kind, message), (other_kind, other_message) = [task.outcome() for task in tasks]
    assert kind == "AirflowFailException" and "Error code is: 2." in message
    assert other_kind == "AirflowException" and "Error code is: 1." in other_message
    assert message.splitlines()[-1] == other_message.splitlines()[-1] == "error: item 7 has no price"


def test_a_spark_submit_that_is_killed_fails_with_its_exit_code_and_last_lines_and_is_tried_again(tmp_path):
    code = (
        "import os, signal, time\n"
        "print('error: the last words', flush=True)\n"
        "time.sleep(2)\n"  # the parent, which is killed, is what hands the line on
        "os.kill(os.getppid(), signal.SIGKILL)\n"  # what an out-of-memory killer does
    )
    kind, message = Task(tmp_path, code).outcome()
    assert kind == "AirflowException" and "Error code is: -9." in message
    assert message.splitlines()[-1] == "error: the last words"


def test_a_connection_to_a_master_that_there_is_not_fails_and_says_which(tmp_path):
    wrong = '{"conn_type": "spark", "host": "sparkk://nowhere"}'
    code = "from pyspark.sql import SparkSession\nSparkSession.builder.getOrCreate()"
    kind, message = Task(tmp_path, code, AIRFLOW_CONN_SOLARIS_SPARK=wrong).outcome()
    assert kind == "AirflowException" and "Error code is: 1." in message
    assert "Master" in message and "spark" in message


@pytest.mark.slow
def test_a_master_that_does_not_answer_is_one_line_and_is_tried_again(tmp_path):
    """A job through the operator and a real spark-submit, which gives up after a minute; nobody listens at port 9."""
    silent = json.dumps({"conn_type": "spark", "host": "spark://127.0.0.1", "port": 9})
    root = tmp_path / "solaris"
    code = (
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from jobs.common.main import main\n"
        f"main('update_histories', ['--as-of', '2026-01-03T12:00:00Z', '--set', 'storage.root={root}'])\n"
    )
    kind, message = Task(tmp_path, code, AIRFLOW_CONN_SOLARIS_SPARK=silent).outcome()
    assert kind == "AirflowException" and "Error code is: 1." in message
    line = next(line for line in message.splitlines() if line.startswith("failed: "))
    assert line.startswith("failed: Spark's master spark://127.0.0.1:9 can't be reached") and "--master" in line
    assert "Traceback" not in message
    assert not (root / "tables").exists()


def test_a_dry_run_ends_as_skipped_and_a_missing_spark_submit_is_named(tmp_path):
    assert Task(tmp_path, DRY, "dry_run=yes").outcome()[0] == "AirflowSkipException"
    kind, message = Task(tmp_path, DRY, PATH="/nowhere").outcome()
    assert (kind, message) == (
        "AirflowFailException",
        "spark-submit is not on the worker's PATH: install pyspark there",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGTERM, "AirflowException"),  # stopped from the UI, or the worker is shut down
        (signal.SIGALRM, "AirflowTaskTimeout"),  # what execution_timeout sends
        (signal.SIGKILL, None),  # the worker dies
    ],
)
def test_a_task_takes_its_spark_application_with_it(tmp_path, number, expected):
    task = Task(tmp_path, SLEEPS)
    try:
        task.wait_until_working()
        # The task, spark-submit's JVM, the driver, the daemon and its worker.
        assert len(task.processes()) >= 5
        task.process.send_signal(number)
        if expected is not None:
            kind, message = task.outcome()
            assert kind == expected, message
        until(lambda: not task.processes(), "processes are left")
    finally:
        task.kill()
