"""A Spark standalone cluster on loopback, and spark-submit to it: for tests/test_cluster.py and bench/cluster.py."""

import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pyspark

from tests.processes import MARK, marked, until

PROJECT = Path(__file__).parents[1]
JARS = ",".join(str(jar) for jar in sorted((PROJECT / ".jars").glob("*.jar")))


def properties(name, target, **changes):
    """A properties file of conf/ with some properties changed; None takes one out."""
    lines = (PROJECT / "conf" / name).read_text().splitlines()
    found = dict(line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    found |= {key.replace("__", "."): value for key, value in changes.items()}
    target.write_text("".join(f"{key} {value}\n" for key, value in found.items() if value is not None))
    return target


def free_port():
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """A master and two workers of one core each. `environ` is what spark-submit needs to be ended with it."""

    def __init__(self, folder):
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environ = {**os.environ, MARK: self.mark, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(folder)}
        self.port = free_port()
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0")
        until(self._listens, "no master")
        self.workers = [self.add_worker(), self.add_worker()]

    def _start(self, kind, *arguments):
        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        with (self.folder / f"{kind}.log").open("ab") as output:
            return subprocess.Popen(
                [str(spark_class), f"org.apache.spark.deploy.{kind}", *arguments],
                env=self.environ,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def add_worker(self):
        size = ("--cores", "1", "--memory", "1g", "--host", "127.0.0.1", "--webui-port", "0")
        return self._start("worker.Worker", *size, f"spark://127.0.0.1:{self.port}")

    def machine_of(self, executor):
        """A worker and all its processes: the one that runs the executor with that id."""
        for worker in self.workers:
            if worker.poll() is None:
                below = psutil.Process(worker.pid).children(recursive=True)
                if any(_option(process, "--executor-id") == executor for process in below):
                    return [psutil.Process(worker.pid), *below]
        return []

    def stop(self):
        while left := marked(self.mark):
            for process in left:
                process.kill()
            time.sleep(0.1)


def _option(process, name):
    """What follows an option on the command line of a process; None if it has not got it or has ended."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    return command[command.index(name) + 1] if name in command else None


def cluster_properties(cluster, target, **changes):
    """conf/spark-standalone.conf for the cluster and this machine: its size, its jars, its Python; and changes."""
    size = {
        "spark__master": f"spark://127.0.0.1:{cluster.port}",
        "spark__jars__packages": None,
        "spark__jars": JARS,
        "spark__pyspark__python": sys.executable,
        "spark__pyspark__driver__python": sys.executable,
        "spark__driver__memory": "1g",
        "spark__driver__host": "127.0.0.1",
        "spark__driver__bindAddress": "127.0.0.1",
        "spark__ui__enabled": "false",
        "spark__executor__cores": "1",
        "spark__executor__memory": "1g",
    }
    return properties("spark-standalone.conf", target, **{**size, **changes})


def local_properties(target, **changes):
    """conf/spark-local.conf with as many cores as the cluster has; and changes."""
    size = {"spark__master": "local[2]", "spark__jars": JARS, "spark__driver__memory": "1g"}
    return properties("spark-local.conf", target, **size, **changes)


def spark_submit(file, application, *arguments, options, environ):
    """Starts jobs/APPLICATION.py with a properties file. Returns the process; its output is one stream."""
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--properties-file", str(file)]
    return subprocess.Popen(
        [*submit, *options, str(PROJECT / "jobs" / f"{application}.py"), *arguments],
        # Spark's scripts look for a Python on the PATH, which need not be the one with pyspark.
        env={**environ, "PYSPARK_PYTHON": sys.executable},
        cwd=Path(file).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Waits for its end, which must be a success."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
