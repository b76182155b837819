"""Resolves jars once by Spark: Delta Lake's into .jars, or with `s3` those of s3a:// into .jars/s3."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from jobs.common.failures import S3_PACKAGE
from jobs.common.session import DELTA_PACKAGE, PROJECT

SDK = "2.35.4"  # what hadoop-aws 3.5.0 is built with
S3_PACKAGES = (
    S3_PACKAGE,
    # Instead of software.amazon.awssdk:bundle, which holds every service of AWS: hundreds of MB.
    *(f"software.amazon.awssdk:{part}:{SDK}" for part in ("s3", "s3-transfer-manager", "sts", "apache-client")),
    f"software.amazon.awssdk:netty-nio-client:{SDK}",
)

# What Spark has on its class path already.
PROVIDED = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "org.apache.logging.log4j:log4j-api",
    "org.apache.logging.log4j:log4j-core",
    "org.apache.logging.log4j:log4j-slf4j2-impl",
    "org.apache.parquet:parquet-hadoop",
    "com.fasterxml.jackson.core:jackson-annotations",
    "com.fasterxml.jackson.core:jackson-core",
    "com.fasterxml.jackson.core:jackson-databind",
    "com.google.code.findbugs:jsr305",
    "com.fasterxml.jackson.datatype:jackson-datatype-jdk8",
    "org.locationtech.jts:jts-core",
    "org.roaringbitmap:RoaringBitmap",
    "javax.annotation:javax.annotation-api",
    "software.amazon.awssdk:bundle",
)


def resolve(packages: Sequence[str], target: Path, first: str) -> None:
    """Puts the packages and what they need into the folder. first: part of the name of a jar that must be there."""
    cache = PROJECT / ".cache" / "ivy"
    shutil.rmtree(cache, ignore_errors=True)
    spark = (
        SparkSession.builder.master("local[1]")
        .appName("fetch jars")
        .config("spark.jars.packages", ",".join(packages))
        .config("spark.jars.excludes", ",".join(PROVIDED))
        .config("spark.jars.ivy", str(cache))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.stop()
    jars = sorted((cache / "jars").glob("*.jar"))
    if not any(first in jar.name for jar in jars):
        sys.exit(f"no jar of {packages[0]} was resolved")
    staging = PROJECT / ".jars.new"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for jar in jars:
        shutil.copy2(jar, staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["s3"]:
        resolve(S3_PACKAGES, PROJECT / ".jars" / "s3", "hadoop-aws")
    else:
        resolve([DELTA_PACKAGE], PROJECT / ".jars", "delta-spark")
