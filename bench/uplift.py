"""What the embeddings are worth: the pipeline on a simulated platform, then evaluate_uplift on what it served."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from measure import arguments

from jobs.common.clock import steps
from jobs.common.config import load_config
from jobs.common.console import run_with_progress
from jobs.common.series import SERIES, Entry
from jobs.common.session import PROJECT, build_session
from jobs.common.terminal import console

END = datetime(2026, 1, 10, tzinfo=UTC)
FIRST = END - timedelta(days=3)
LAST = FIRST + timedelta(hours=60)

if __name__ == "__main__":
    options = arguments(__doc__, world={"default": "standard"}, cache={"type": Path, "required": True})
    config = load_config(
        [PROJECT / "conf" / "uplift.toml"],
        [f"storage.root={options.cache / options.world}", f"make_world.world={options.world}"],
    )
    spark = build_session(config, "bench uplift")
    run_with_progress(spark, config, [END], [Entry("make_world")], console)
    series = [entry for entry in SERIES if entry.job != "maintain_tables"]
    series.append(Entry("join_features", after=("ingest_log",)))
    run_with_progress(spark, config, steps(FIRST, LAST, config.window.hours), series, console)
    spark.stop()
