"""The one place that builds a SparkSession."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from py4j.java_gateway import JavaPackage
from pyspark import SparkConf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.common.config import Config
from jobs.common.errors import RunFailed, UserError

PROJECT = Path(__file__).resolve().parents[2]
DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
# Loggers below org.apache.spark that repeat what a failed or cancelled task raises.
TOLD_TWICE = (
    "executor.Executor",
    "scheduler.TaskSetManager",
    "sql.delta.files.DeltaFileFormatWriter",
    "sql.execution.datasources.FileFormatWriter",
    "util.Utils",
)
DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"


def delta_jars(config: Config) -> str:
    """The Delta jars that set-up resolved, comma-separated; empty if there are none. With those of S3, if anything of
    the config is on it.

    Raises UserError if the jars of S3 are needed and not there.
    """
    folder = Path(config.spark.jars_dir) if config.spark.jars_dir else PROJECT / ".jars"
    jars = sorted(folder.glob("*.jar"))
    if any(place.startswith("s3a://") for place in (config.storage.root, config.log.path)):
        s3 = sorted((folder / "s3").glob("*.jar"))
        if not s3:
            raise UserError(f"there are no jars for s3a:// in {folder / 's3'}; run make s3")
        jars += s3
    return ",".join(map(str, jars))


def build_session(config: Config, app_name: str) -> SparkSession:
    """Returns the session for a job: the one spark-submit made, with our settings, or a new local one.

    Everything that decides results is set here (UTC, Delta, Arrow limits in bytes, threads a task); everything that
    decides where and how large the job runs is left to spark-submit where it has spoken.

    Raises UserError if the session has no Delta Lake.
    """
    os.environ["TZ"] = "UTC"  # pyspark turns timestamps into local datetimes on the driver
    time.tzset()
    spark_config = config.spark
    threads = str(spark_config.task_cpus)
    builder = SparkSession.builder.appName(app_name)
    # spark-submit hands its own conf to the JVM before Python starts; pyspark finds the gateway in the environment.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers run in this environment, activated or not
        builder = builder.master(spark_config.master).config("spark.driver.memory", spark_config.driver_memory)
        jars = delta_jars(config)
        builder = builder.config("spark.jars", jars) if jars else builder.config("spark.jars.packages", DELTA_PACKAGE)
        builder = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config(
            "spark.ui.showConsoleProgress", "false"
        )
    settings = {
        "spark.sql.extensions": DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(spark_config.shuffle_partitions),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(spark_config.arrow_batch_mb << 20),
        "spark.sql.execution.pythonUDF.arrow.enabled": "true",
        "spark.task.cpus": threads,
        "spark.executorEnv.OMP_NUM_THREADS": threads,
        "spark.executorEnv.OPENBLAS_NUM_THREADS": threads,
        "spark.executorEnv.MKL_NUM_THREADS": threads,
        "spark.executorEnv.TZ": "UTC",
        "spark.sql.legacy.parquet.nanosAsLong": "false",
        "spark.databricks.delta.snapshotPartitions": "2",
        # Slices are replaced by their partition: the commit needs no scan for rows that match.
        "spark.databricks.delta.replaceWhere.dataColumns.enabled": "false",
        # A server of one's own has no host name for each bucket. Credentials and region need no setting: Spark and the
        # SDK take them from the AWS_* environment.
        **({"spark.hadoop.fs.s3a.path.style.access": "true"} if os.environ.get("AWS_ENDPOINT_URL") else {}),
        **spark_config.conf,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = _start(builder, config)
    # Of a jar that is not there Spark only warns, and goes on without the extension.
    missing = isinstance(spark._jvm.io.delta.sql.DeltaSparkSessionExtension, JavaPackage)  # type: ignore[union-attr]
    if missing or DELTA_EXTENSION not in (spark.conf.get("spark.sql.extensions") or ""):
        raise UserError(
            f"the Spark session has no Delta Lake; submit with --properties-file conf/spark-local.conf or "
            f"--packages {DELTA_PACKAGE} --conf spark.sql.extensions={DELTA_EXTENSION}"
        )
    default = spark._jsc.hadoopConfiguration().get("fs.defaultFS")
    if "://" not in config.storage.root and not default.startswith("file:"):
        raise UserError(
            f"storage.root {config.storage.root} would be on {default}, Spark's default file system, and models and "
            f"snapshots on this disk; write it as {default.rstrip('/')}/..., and a mounted folder as storage.files"
        )
    spark.sparkContext.setLogLevel("ERROR")
    quiet(spark)
    # pyspark logs every failed analysis as a page of JSON beside raising it; what is raised is enough.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    register_functions(spark)
    return spark


def quiet(spark: SparkSession) -> None:
    """Leaves one voice for an error and one for Ctrl-C: the caller's."""
    if (spark.sparkContext.master or "").startswith("local"):
        # What a task of this very process raises comes back to the caller; the log would only say it twice before.
        log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
        for name in TOLD_TWICE:
            log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)
    # py4j logs a page for a call that Ctrl-C breaks off, and raises it as well.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    # pyspark's own handler calls the JVM in the midst of another call to it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def java() -> str:
    """The java program that a new session runs. Raises UserError if there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java" if home else "java")
    if found is None:
        where = f"at JAVA_HOME = {home}" if home else "on PATH, and JAVA_HOME is not set"
        raise UserError(f"no java {where}; install a JDK 17 or newer, or point JAVA_HOME at one")
    return found


def _start(builder: SparkSession.Builder, config: Config) -> SparkSession:
    """Raises UserError if Spark does not start: nothing of ours has run yet, so it is the machine or the settings.

    Raises RunFailed if spark-submit's master can't be reached, which may be over by the next try.
    """
    if SparkSession.getActiveSession() is not None:
        return builder.getOrCreate()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        try:
            return builder.getOrCreate()
        except Exception as error:
            if "stopped SparkContext" not in str(error):
                raise
            # Spark gives up on a master after three tries of twenty seconds, and stops the context that waits for it.
            raise RunFailed(
                f"Spark's master {SparkConf().get('spark.master')} can't be reached, or it ended the application; "
                "check that it runs, and --master (in Airflow the host and port of the connection)"
            ) from None
    program = java()
    try:
        return builder.getOrCreate()
    except Exception as error:
        version = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        cause = re.search(r"^: (\S+: .*)$", str(error), re.MULTILINE)  # the JVM's own words, after Py4J's
        jars = "" if delta_jars(config) else "; the Delta jars are not set up: run make setup"
        raise UserError(
            f"Spark does not start: {(cause[1] if cause else reason)[:300]} (java: {program}, "
            f"{(version or ['no version'])[0]}, 17 or newer is needed; spark.master = {config.spark.master}, "
            f"spark.driver_memory = {config.spark.driver_memory}{jars})"
        ) from None


def register_functions(spark: SparkSession) -> None:
    """Registers `unpack_embedding(embedding, codec)` for SQL users: array<float> from the stored binary."""
    import pandas as pd

    def unpack_embedding(embedding: pd.Series, codec: pd.Series) -> pd.Series:
        from solaris_udf.codec import decode

        values = [
            None if packed is None else decode([packed], kind)[0] for packed, kind in zip(embedding, codec, strict=True)
        ]
        return pd.Series(values, dtype=object)

    spark.udf.register("unpack_embedding", F.pandas_udf(unpack_embedding, "array<float>"))  # type: ignore[attr-defined,call-overload,unused-ignore]
