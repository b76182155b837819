"""What an export is checked against: the tables' own counts, and lookups of a sample of their rows."""

from datetime import timedelta
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.runs import Run
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.reader import Snapshot
from solaris_udf.snapshot.validate import Totals, check_sample


def count_totals(run: Run, version: str) -> Totals:
    """What the tables say must be in the snapshot, counted apart from the export itself."""
    serving = run.config.serving
    pair_start = slice_of(run.as_of - timedelta(hours=serving.ttl_hours))
    user_start = run.as_of - timedelta(hours=serving.max_user_age_hours)
    now = (F.col("slice") <= run.slice) & (F.col("model_version") == version)
    pairs = run.tables.read("pair_embeddings").where((F.col("slice") > pair_start) & now)
    users = run.tables.read("user_embeddings").where((F.col("slice") > slice_of(user_start)) & now)
    row = (
        pairs.agg(F.count_distinct("user_id", "item_id").alias("pairs"))
        .crossJoin(users.where(F.col("newest_at") > ts(user_start)).agg(F.count_distinct("user_id").alias("means")))
        .first()
    )
    assert row is not None
    return Totals(row.pairs, row.means)


def check_lookups(folder: Path, manifest: Manifest, pairs: DataFrame, count: int) -> None:
    """Lookups of about count of the pairs must give the table's vectors. Raises SnapshotError."""
    if count and manifest.pairs:
        rows = sample_rows(pairs, manifest.pairs, count).toArrow()  # bounded, whatever the table's size
        check_sample(Snapshot.open(folder, verify="full", engine="numpy"), rows, manifest.as_of_micros)


def sample_rows(pairs: DataFrame, total: int, count: int) -> DataFrame:
    """A deterministic sample of about count of the pairs, and never more than four times as many."""
    every = max(1, total // count)
    return (
        pairs.where(F.pmod(F.xxhash64("item_id", "user_id"), F.lit(every)) == 0)
        .select("user_id", "item_id", "embedding", "codec", F.unix_micros("as_of").alias("computed_at"))
        .limit(4 * count)
    )
