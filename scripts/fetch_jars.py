"""Resolves Delta Lake's jars once into .jars, through Spark's own Maven resolver."""

import shutil
import sys

from pyspark.sql import SparkSession

from jobs.common.session import DELTA_PACKAGE, PROJECT

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
)


def main() -> None:
    cache = PROJECT / ".cache" / "ivy"
    spark = (
        SparkSession.builder.master("local[1]")
        .appName("fetch jars")
        .config("spark.jars.packages", DELTA_PACKAGE)
        .config("spark.jars.excludes", ",".join(PROVIDED))
        .config("spark.jars.ivy", str(cache))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.stop()
    jars = sorted((cache / "jars").glob("*.jar"))
    if not any("delta-spark" in jar.name for jar in jars):
        sys.exit("no Delta jar was resolved")
    staging = PROJECT / ".jars.new"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for jar in jars:
        shutil.copy2(jar, staging)
    target = PROJECT / ".jars"
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
