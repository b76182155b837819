"""The operator of a job: spark-submit that ends with everything it started, and says what can be retried."""

import ctypes
import os
import re
import signal
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Connection
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    AirflowSkipException,
)
from airflow.sdk.log import mask_secret

KILL_AFTER_SECONDS = 3  # Airflow kills the task itself five seconds after it asked it to stop
USERS_MISTAKE = re.compile(r"Error code is: 2\.")
CREDENTIAL = re.compile(r"(secret|password|token|access_key|private_key)(?!.*(file|path)$)", re.IGNORECASE)
PR_SET_PDEATHSIG = 1


class SparkJobOperator(SparkSubmitOperator):
    """SparkSubmitOperator whose failures and kills are those of the job.

    - A connection that does not exist fails the task at once; the provider would submit to YARN instead.
    - Exit code 2, a mistake in input or config, fails without a retry: the next try would say the same.
    - A killed task, or one past its timeout, takes spark-submit, the driver and the Python workers with it, also when
      the worker dies by kill -9: a driver that outlives its task could write after the next try has begun.
    - What the worker's environment holds under the name of a credential is masked in the log and in errors.
    - With Param dry_run the command ends as skipped, so that no asset is updated.
    """

    _was_killed = False

    def execute(self, context: Any) -> None:
        """Runs the job. Raises AirflowException with the exit code and the last lines of the log if it fails."""
        mask_credentials()
        try:
            Connection.get(self._conn_id)
        except AirflowNotFoundException:
            raise AirflowFailException(
                f"there is no Airflow connection {self._conn_id!r}; create it: airflow connections add "
                f"{self._conn_id} --conn-type spark --conn-host 'local[*]' (or your master)"
            ) from None
        try:
            super().execute(context)
        except FileNotFoundError as error:
            raise AirflowFailException(f"{error.filename} is not on the worker's PATH: install pyspark there") from None
        except AirflowException as error:
            if USERS_MISTAKE.search(str(error)):
                raise AirflowFailException(str(error)) from None
            raise
        if self._was_killed:
            raise AirflowException("the task was stopped, and its Spark application with it")
        if context["params"].get("dry_run"):
            raise AirflowSkipException("dry run: command and config are valid; nothing was read or written")

    def on_kill(self) -> None:
        """Ends the Spark application, asking first and then by force."""
        if self._hook is None:
            return
        self._was_killed = True
        started = self._processes()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        # Kills spark-submit, and an application on a cluster, where the driver is not ours.
        super().on_kill()
        # Not spark-submit itself: its exit code is the hook's to collect.
        _, left = psutil.wait_procs(started[1:], timeout=KILL_AFTER_SECONDS)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _get_hook(self) -> SparkSubmitHook:
        hook = super()._get_hook()
        hook.submit = partial(hook.submit, preexec_fn=partial(_end_with_parent, _libc()))  # type: ignore[method-assign]
        return hook

    def _processes(self) -> list[psutil.Process]:
        submit = getattr(self._hook, "_submit_sp", None)
        if submit is None or submit.poll() is not None:
            return []
        try:
            parent = psutil.Process(submit.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def mask_credentials() -> None:
    """Has Airflow hide the values of environment variables that are named like credentials."""
    for name, value in os.environ.items():
        if CREDENTIAL.search(name) and value:
            mask_secret(value)


def _libc() -> Any:
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:  # not Linux
        return None


def _end_with_parent(libc: Any) -> None:
    """In the child before it runs spark-submit: the system asks it to stop when the task's process is gone."""
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
