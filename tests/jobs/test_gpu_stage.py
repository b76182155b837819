"""The inference stage alone holds a GPU, on a small cluster whose worker says that it has one."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

ON_A_CLUSTER = """
import sys
import pyarrow as pa
from pyspark.sql import SparkSession
import jobs.embed_pairs as job
from solaris_udf.foundation.udf import assigned_device

def device(batches):
    for batch in batches:
        yield pa.record_batch({"device": [assigned_device()] * len(batch)})

builder = SparkSession.builder.master("local-cluster[1,1,1024]").config("spark.ui.enabled", "false")
for key, value in {"driver.bindAddress": "127.0.0.1", "driver.host": "127.0.0.1", "executor.memory": "1g"}.items():
    builder = builder.config(f"spark.{key}", value)
for part in ("worker", "executor"):
    builder = builder.config(f"spark.{part}.resource.gpu.amount", "1")
    builder = builder.config(f"spark.{part}.resource.gpu.discoveryScript", sys.argv[1])
spark = builder.getOrCreate()
rows = spark.range(0, 4, 1, 2)
profile = job._profile(job.Settings(gpus=1.0), 1)
print("inference", {row.device for row in rows.mapInArrow(device, "device STRING", profile=profile).collect()})
print("other", {row.device for row in rows.mapInArrow(device, "device STRING").collect()})
spark.stop()
"""


@pytest.mark.slow
def test_the_inference_stage_gets_the_gpu_and_no_other_stage_does(tmp_path):
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5"]}'\n""")
    script.chmod(0o755)
    home, project = str(Path(pyspark.__file__).parent), str(Path(__file__).parents[2])
    environment = os.environ | {"SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": project}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CLUSTER, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "inference {'cuda:5'}" in done.stdout and "other {'cpu'}" in done.stdout
