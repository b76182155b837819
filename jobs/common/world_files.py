"""The simulated world's folder below storage.root, which may be a URI: make_world writes it, evaluations read it."""

from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession

from jobs.common.config import Config

if TYPE_CHECKING:
    from solaris_udf.world.parameters import WorldParameters


def file_system(spark: SparkSession, uri: str) -> tuple[Any, Any]:
    """(Hadoop FileSystem, Path) of a path or URI."""
    path = spark._jvm.org.apache.hadoop.fs.Path(uri)  # type: ignore[union-attr]
    return path.getFileSystem(spark._jsc.hadoopConfiguration()), path


def exists(spark: SparkSession, uri: str) -> bool:
    files, path = file_system(spark, uri)
    return bool(files.exists(path))


def world_parameters(spark: SparkSession, config: Config) -> "WorldParameters | None":
    """What make_world made its world from; None if the log is another dataset's, or there is no world."""
    from solaris_udf.world.parameters import WorldParameters

    path = config.path("raw", "world", "world.json")
    if config.log.dataset != "world" or not exists(spark, path):
        return None
    text = spark.read.text(path, wholetext=True).first()
    assert text is not None
    return WorldParameters.from_json(text["value"])


def click_truth(spark: SparkSession, config: Config) -> DataFrame | None:
    """(request_id, item_id, truth DOUBLE): the world's click probability of every row; None without a world."""
    path = config.path("raw", "world", "truth")
    if config.log.dataset != "world" or not exists(spark, path):
        return None
    rows = spark.read.parquet(path)
    return rows.selectExpr("request_id", "item_id", "click_probability AS truth")
