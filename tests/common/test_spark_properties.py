"""The properties files of conf/: every one complete, and no property written twice."""

from pathlib import Path

import pytest

from jobs.common.session import DELTA_EXTENSION, DELTA_PACKAGE

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(path.name for path in CONF.glob("spark-*.conf"))


def properties(name):
    lines = (CONF / name).read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split(None, 1)) for line in lines if line.strip() and not line.startswith("#")]
    assert len({key for key, _ in pairs}) == len(pairs), f"{name}: a property stands twice"
    return {key: value.strip() for key, value in pairs}


@pytest.mark.parametrize("name", FILES)
def test_each_gives_a_session_delta_and_a_size(name):
    found = properties(name)
    assert found["spark.sql.extensions"] == DELTA_EXTENSION
    assert found["spark.sql.catalog.spark_catalog"] == "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    assert found.get("spark.jars.packages", DELTA_PACKAGE) == DELTA_PACKAGE
    assert "spark.jars" in found or "spark.jars.packages" in found
    assert "spark.driver.memory" in found and "spark.master" in found


@pytest.mark.parametrize("name", [name for name in FILES if name != "spark-local.conf"])
def test_each_cluster_survives_lost_tasks_pays_for_no_pair_twice_and_shows_the_gpu_lines(name):
    found, text = properties(name), (CONF / name).read_text(encoding="utf-8")
    assert found["spark.speculation"] == "false" and int(found["spark.task.maxFailures"]) > 1
    assert {"spark.executor.cores", "spark.executor.memory", "spark.pyspark.python"} <= set(found)
    assert "# spark.executor.resource.gpu.amount" in text and "# spark.task.resource.gpu.amount" in text
    assert not any(word in key for key in found for word in ("secret", "password", "token"))
