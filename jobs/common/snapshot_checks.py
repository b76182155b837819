"""What an export is checked against: the tables' own counts, and lookups of a sample of their rows."""

from datetime import timedelta
from pathlib import Path

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import slice_of, ts
from jobs.common.config import Serving
from jobs.common.runs import Run
from jobs.common.snapshot_users import resolve_users
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.reader import Snapshot
from solaris_udf.snapshot.validate import Totals, check_sample
from solaris_udf.tiers import PAIR


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


def check_lookups(
    folder: Path, manifest: Manifest, pairs: DataFrame, means: DataFrame, lists: DataFrame, serving: Serving, count: int
) -> None:
    """Every file must be what the manifest says, and lookups of a sample, about count of the pairs and about count of
    the users with a mean, must give the tables' vectors. Raises SnapshotError.

    pairs: the newest embedding of each; means, lists: what resolve_users makes users of. count 0: no sample. The
    centroids of the tier cold are in no table and left out.
    """
    snapshot = Snapshot.open(folder, verify="full", engine="numpy")
    if count:
        users = resolve_users(
            means, lists, serving, only=sampled(["user_id", "user_id"], manifest.users_embedded, count)
        )
        rows = sample_pairs(pairs, manifest.pairs, count).unionByName(
            users.withColumn("item_id", F.lit(0).cast("bigint")).drop("source_user", "neighbors").limit(4 * count)
        )
        check_sample(snapshot, rows.toArrow(), manifest.as_of_micros)  # bounded, whatever the tables' size


def sample_pairs(pairs: DataFrame, total: int, count: int) -> DataFrame:
    """A deterministic sample of about count of the pairs, and never more than four times as many."""
    return (
        pairs.where(sampled(["item_id", "user_id"], total, count))
        .select(
            "user_id",
            "item_id",
            "embedding",
            "codec",
            F.unix_micros("as_of").alias("computed_at"),
            F.lit(PAIR).cast("tinyint").alias("tier"),
            F.lit(1.0).cast("float").alias("similarity"),
        )
        .limit(4 * count)
    )


def sampled(key: list[str], total: int, count: int) -> Column:
    """Whether a row is one of about count of total. The key's hash must not be the one that rows are sharded by."""
    return F.pmod(F.xxhash64(*key), F.lit(max(1, total // count))) == 0
