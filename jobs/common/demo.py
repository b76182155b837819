"""`solaris demo`: the whole pipeline on a simulated ad platform or on MovieLens 100K, and a report."""

import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from jobs.common.clock import steps
from jobs.common.config import Config, load_config
from jobs.common.console import run_with_progress, summary
from jobs.common.errors import UserError
from jobs.common.failures import writable
from jobs.common.lookup_view import show_examples
from jobs.common.report import write_report
from jobs.common.runs import Outcome
from jobs.common.series import SERIES, Entry
from jobs.common.session import PROJECT, build_session

RECBOLE = "recbole==1.2.1"  # carries a copy of MovieLens 100K in its wheel


@dataclass(frozen=True)
class Demo:
    """One demo: its config, its slices, and what makes its raw log."""

    config_file: str
    first: datetime
    last: datetime
    world_until: datetime | None = (
        None  # end of the simulated world, past the last slice so that its snapshot answers rows
    )


DEMOS = {
    "world": Demo(
        "demo.toml",
        datetime(2026, 1, 5, tzinfo=UTC),
        datetime(2026, 1, 5, 18, tzinfo=UTC),
        world_until=datetime(2026, 1, 7, tzinfo=UTC),
    ),
    "movielens-100k": Demo("movielens-100k.toml", datetime(1998, 3, 30, tzinfo=UTC), datetime(1998, 3, 31, tzinfo=UTC)),
}


def run_demo(data: str, overrides: Sequence[str], console: Console) -> None:
    """Runs a demo into its own storage root, resuming where an earlier call stopped.

    Raises UserError for an unknown dataset, or if a dataset can't be fetched.
    """
    if data not in DEMOS:
        raise UserError(f"there is no demo on {data!r}; demos: {', '.join(DEMOS)}")
    demo = DEMOS[data]
    clock = time.monotonic()
    file = PROJECT / "conf" / demo.config_file
    config = load_config([file], overrides)
    writable(*config.roots)
    if demo.world_until is None:
        fetch_movielens(Path(config.path("raw", "ml-100k")))
    moments = steps(demo.first, demo.last, config.window.hours)
    series = [*SERIES, Entry("join_features", after=("ingest_log",))]
    with console.status("starting Spark"):
        spark = build_session(config, "solaris demo")
    try:
        outcomes: list[Outcome] = []
        if demo.world_until is not None:
            outcomes += run_with_progress(spark, config, [demo.world_until], [Entry("make_world")], console)
        outcomes += run_with_progress(spark, config, moments, series, console)
        outcomes += evaluate(spark, config, demo.last, console)
        summary(spark, config, outcomes, console)
        report = write_report(spark, config, Path(config.path("reports", "index.html")))
    finally:
        spark.stop()
    show_examples(config, None, 2, console)
    shown = file.relative_to(PROJECT)
    console.print(
        f"\nreport: {report}\n"
        f"a pair: solaris lookup --config {shown} USER ITEM\n"
        f'a query: solaris sql --config {shown} "SELECT tier, sum(rows) FROM coverage_audit GROUP BY tier"\n'
        f"took {time.monotonic() - clock:.0f} s",
        highlight=False,
    )


def evaluate(spark: SparkSession, config: Config, as_of: datetime, console: Console) -> list[Outcome]:
    return run_with_progress(spark, config, [as_of], [Entry("evaluate_uplift")], console)


def fetch_movielens(folder: Path) -> None:
    """Puts ml-100k.inter and ml-100k.item into folder, from the wheel of a package that carries them."""
    names = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")
    if all((folder / name).exists() for name in names):
        return
    cache = PROJECT / ".cache"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(cache),
        RECBOLE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(cache.glob("recbole-*.whl"))
    if done.returncode or not wheels:
        raise UserError(
            f"MovieLens 100K could not be fetched ({(done.stderr.strip().splitlines() or ['no wheel'])[-1]}); "
            f"put {', '.join(names)} into {folder} by hand"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheels[-1]) as wheel:
        for name in names:
            partial = folder / f".{name}"
            partial.write_bytes(wheel.read(f"recbole/dataset_example/ml-100k/{name}"))
            partial.replace(folder / name)
