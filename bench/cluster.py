"""What a cluster costs on one machine: a slice on a standalone cluster, two workers with a core each, and on local[2].

Both by spark-submit with the properties files of conf/, on copies of the same tables: in one session, and (without
--quick) with one spark-submit a job, as Airflow does. Wall time of whole commands: the cluster starts three JVMs where
local[2] has one. Both with the Spark properties of conf/demo.toml, which keep what a small slice costs to compile low.
The world is the tiny one with --quick, else the demo's.
"""

import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from measure import Figure, arguments, at_most, interleaved, report

sys.path.append(str(Path(__file__).resolve().parents[1]))
from jobs.common.series import SERIES
from jobs.common.terminal import console
from scripts.build_dist import build_zip
from tests.standalone import Cluster, cluster_properties, finish, local_properties, spark_submit

WORLD_END, FIRST, SECOND = "2026-01-05T00:00:00Z", "2026-01-03T12:00:00Z", "2026-01-03T18:00:00Z"
SETTINGS = ["spark.shuffle_partitions=2", "log.dataset=world", "window.hours=6", "train_foundation.size=tiny"]
SPARK = tomllib.loads((Path(__file__).parents[1] / "conf" / "demo.toml").read_text("utf-8"))["spark"]["conf"]
# Executors as the driver, and no wait for the executor that has a block when the other one is free.
SPARK |= {
    "spark.executor.extraJavaOptions": SPARK["spark.driver.extraJavaOptions"],
    "spark.locality.wait": "0",
}
SLICE_JOBS = [entry.job for entry in SERIES if entry.cadence == "slice"]
TARGET = 1.3


class Bench:
    """A folder with tables after the first slice, and a cluster."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self.copies = folder, 0
        self.settings = [*SETTINGS, f"make_world.size={size}", "train_foundation.epochs=1"]
        self.cluster = Cluster(folder)
        self.files = {
            "local[2]": local_properties(folder / "local.conf", **SPARK),
            "cluster": cluster_properties(self.cluster, folder / "standalone.conf", **SPARK),
        }
        self.options = ("--py-files", str(build_zip(folder / "solaris.zip")))
        for command in (["make_world", "--as-of", WORLD_END], ["__main__", "run", "--from", FIRST]):
            self.submit("local[2]", folder / "base", command)

    def submit(self, where: str, root: Path, command: Sequence[str]) -> None:
        settings = [f"--set={setting}" for setting in (f"storage.root={root}", *self.settings)]
        application, *rest = command
        options, environ = (self.options, self.cluster.environ) if where == "cluster" else ((), os.environ)
        finish(spark_submit(self.files[where], application, *rest, *settings, options=options, environ=environ))

    def second_slice(self, where: str, commands: Sequence[Sequence[str]]) -> None:
        """The commands of the second slice, on a copy of the tables (a few MB: tenths of a second)."""
        self.copies += 1
        root = self.folder / f"copy-{self.copies}"
        shutil.copytree(self.folder / "base", root)
        for command in commands:
            self.submit(where, root, command)
        shutil.rmtree(root)

    def compare(self, name: str, commands: Sequence[Sequence[str]], repeats: int, warm_up: int) -> list[Figure]:
        tasks = {where: (lambda where=where: self.second_slice(where, commands)) for where in self.files}
        seconds = interleaved(tasks, repeats, warm_up)
        figures = [Figure(f"{name}, {where}", value, "s") for where, value in seconds.items()]
        ratio = seconds["cluster"] / seconds["local[2]"]
        return [*figures, at_most(f"{name}, cluster / local[2]", ratio, "x", TARGET)]


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        console.print("the world and its first slice", style="dim")
        bench = Bench(Path(name), "tiny" if options.quick else "demo")
        try:
            whole = [["__main__", "run", "--from", SECOND]]
            if options.quick:
                figures = bench.compare("slice in one session", whole, 1, 0)
            else:
                figures = bench.compare("slice in one session", whole, 3, 1)
                each = [[job, "--as-of", SECOND] for job in SLICE_JOBS]
                figures += bench.compare("slice, a spark-submit a job", each, 1, 0)
        finally:
            bench.cluster.stop()
    report("a slice on a cluster of this machine", figures, options.json)


if __name__ == "__main__":
    main()
