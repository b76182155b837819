"""Exports the lookup snapshot: the fresh pair embeddings and each user's vector, sharded, hashed, validated, published.

Reads pair_embeddings (within serving.ttl_hours), user_embeddings (within serving.max_user_age_hours) and the latest
user_neighbors, all of one model version; with the tier `cold` also the groups of users in ranking_log. One Spark task
writes each shard's Arrow files into a staging folder below snapshots/. The driver then checks them against the tables
and against the previous snapshot, renames the folder to snapshots/<slice>-<model_version>-<hash> and moves CURRENT to
it, and writes the `snapshots` row. A failed check leaves CURRENT alone and exits with 1. The same inputs give the same
bytes and the same id, and exporting an old slice again never moves CURRENT back.
"""

import logging
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import micros, slice_of, ts
from jobs.common.config import Section
from jobs.common.errors import RunFailed, UserError
from jobs.common.log import fresh_pair_embeddings, recent_pair_embeddings
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.snapshot_checks import check_lookups, count_totals
from jobs.common.snapshot_push import push
from jobs.common.snapshot_users import cold_users, fresh_user_means, neighbor_lists, resolve_users, user_groups
from jobs.common.versions import served_model
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import MANIFEST, STAGING_PREFIX, is_safe_name
from solaris_udf.snapshot.manifest import Manifest
from solaris_udf.snapshot.publish import publish, reuse_files
from solaris_udf.snapshot.shards import INPUT_COLUMNS, OUTPUT_DDL, USER_COLUMNS, ShardSummary, write_shards
from solaris_udf.snapshot.storage import LocalStorage
from solaris_udf.snapshot.validate import Limits, assemble, check_against_previous, check_content, previous_manifest
from solaris_udf.tiers import TierPolicy

log = logging.getLogger("solaris")

ROWS_PER_SHARD = 1_000_000  # a task then spools some 150 MB of 64-d float16 rows and holds 4 MB in memory
MIN_SHARDS, MAX_SHARDS = 2, 4096


class Settings(Section):
    """The [export_snapshot] section."""

    section = "export_snapshot"
    shards: int = Field(0, ge=0, le=MAX_SHARDS, description="Shards; 0: by the number of rows, a million a shard")
    codec: Literal["float16", "int8"] = Field("float16", description="How the snapshot stores vectors")
    neighbors: int = Field(3, ge=1, le=255, description="Neighbours kept for each user, tried in order of similarity")
    cold_days: float = Field(7.0, gt=0, description="With the tier cold: users of the log's last this many days")
    min_pairs_ratio: float = Field(0.5, ge=0, description="Refuse fewer pairs than this part of the previous'")
    min_users_ratio: float = Field(0.5, ge=0, description="Refuse fewer users than this part of the previous'")
    max_norm_drift: float = Field(0.5, ge=0, description="Refuse a larger relative change of the mean norm")
    push_to: str = Field("", description="Object store (s3://BUCKET/PREFIX) that gets each snapshot that goes live")
    sample: int = Field(200, ge=0, description="Pairs, and users, looked up and compared with the tables; 0: none")


@dataclass(frozen=True)
class Source:
    """What is exported: one model version, and how many dimensions its vectors have (None: as the first one has)."""

    model_version: str
    dim: int | None


def choose_shards(rows: int, setting: int) -> int:
    """The number of shards: the setting if given, else one for each million rows, within bounds."""
    return setting or min(MAX_SHARDS, max(MIN_SHARDS, -(-rows // ROWS_PER_SHARD)))


def shard_rows(pairs: DataFrame, users: DataFrame, shards: int) -> DataFrame:
    """Pairs and users as one frame of write_shards' input: partition = shard, each in the order of the format.

    pairs may have older embeddings of a pair beside the newest: write_shards drops them as they come by in the sort
    that the files need anyway. The hash is that of solaris_udf.snapshot.hashing; flipping its sign bit makes Spark sort
    it as unsigned.
    """
    user_hash = F.xxhash64("user_id")
    # Empty, not null: the size of a batch is asked for after each row, and Arrow's Java lists go through all the nulls
    # before it each time.
    no_neighbors = F.array().cast(users.schema["neighbors"].dataType)
    shard = (user_hash.bitwiseAND(F.lit(0xFFFFFFFF)) % F.lit(shards)).cast("int").alias("shard")
    pair_rows = pairs.select(
        shard,
        F.lit(0).cast("tinyint").alias("kind"),
        F.xxhash64("user_id", "item_id").alias("hash"),
        "user_id",
        "item_id",
        "embedding",
        "codec",
        F.unix_micros("as_of").alias("computed_at"),
        no_neighbors.alias("neighbors"),
    )
    user_rows = users.withColumn("neighbors", F.coalesce("neighbors", no_neighbors)).select(
        shard,
        F.lit(1).cast("tinyint").alias("kind"),
        user_hash.alias("hash"),
        F.lit(0).cast("bigint").alias("item_id"),
        *USER_COLUMNS,
    )
    unsigned = F.col("hash").bitwiseXOR(F.lit(-(1 << 63)))
    # Pairs before users, each by the upper 63 bits of its hash: one number, since Spark compares rows by the first
    # eight bytes of their order and reads whole rows only where those are equal.
    leading = F.shiftrightunsigned("hash", 1).bitwiseOR(
        F.when(F.col("kind") == 0, F.lit(-(1 << 63))).otherwise(F.lit(0))
    )
    return (
        pair_rows.unionByName(user_rows, allowMissingColumns=True)
        .repartitionById(shards, "shard")
        .sortWithinPartitions(leading, unsigned, "user_id", "item_id", F.col("computed_at").desc())
        .select(*INPUT_COLUMNS)
    )


def find_source(run: Run) -> Source:
    """The model version to export: that of the served foundation model; without one, the only one in use.

    Raises UserError if there is no model and the fresh embeddings have none, or several, versions.
    """
    model = served_model(run)
    if model is not None:
        return Source(model.version, model.embedding_dim)
    found: list[str] = []
    for table, hours in (
        ("pair_embeddings", run.config.serving.ttl_hours),
        ("user_embeddings", run.config.serving.max_user_age_hours),
    ):
        start = slice_of(run.as_of - timedelta(hours=hours))
        rows = run.tables.read(table).where((F.col("slice") > start) & (F.col("slice") <= run.slice))
        if not found:
            found = sorted(row.model_version for row in rows.select("model_version").distinct().limit(10).collect())
    if not found:
        models = run.config.path("models", "foundation")
        raise UserError(
            f"export_snapshot {run.slice}: there is nothing to export: no foundation model at or before it "
            f"below {models}, and no fresh embeddings; run embed_pairs first"
        )
    if len(found) > 1:
        raise UserError(
            f"export_snapshot {run.slice}: the fresh embeddings are of several model versions "
            f"({', '.join(found)}) and no foundation model at or before it says which to publish"
        )
    return Source(found[0], None)


def run(run: Run, settings: Settings) -> Report:
    """Exports, validates and publishes one snapshot. Raises RunFailed, with CURRENT untouched, if a check fails."""
    source = find_source(run)
    version, serving = source.model_version, run.config.serving
    if not is_safe_name(version):
        raise UserError(f"model version {version!r} can't be part of a folder's name; use letters, digits, dot, dash")
    root = Path(run.config.path("snapshots"))
    storage = LocalStorage(root)
    totals = count_totals(run, version)
    groups = user_groups(run, settings.cold_days).persist() if "cold" in serving.tiers else None
    at_most_cold = 0 if groups is None else groups.count()
    shards = choose_shards(totals.pairs + totals.means + at_most_cold, settings.shards)
    pairs = recent_pair_embeddings(run.tables, run.as_of, serving.ttl_hours, version)
    means = fresh_user_means(run, version)
    lists = neighbor_lists(run, version, means, settings.neighbors)
    users = resolve_users(means, lists, serving)
    if groups is not None:
        users = users.unionByName(cold_users(run, means, users, groups))

    reused = 0
    staging = f"{STAGING_PREFIX}{run.slice}-{uuid.uuid4().hex[:12]}"
    try:
        write = partial(
            write_shards,
            folder=str((root / staging).resolve()),
            shards=shards,
            codec=settings.codec,
            dim=source.dim,
            neighbors=settings.neighbors,
        )
        clock = time.monotonic()
        written = shard_rows(pairs, users, shards).mapInArrow(write, OUTPUT_DDL).collect()  # one small row a shard
        seconds = time.monotonic() - clock
        manifest = assemble(
            [ShardSummary.parse(row.summary) for row in written],
            root / staging,
            slice_name=run.slice,
            as_of_micros=micros(run.as_of),
            model_version=version,
            codec=settings.codec,
            shards=shards,
            dim=source.dim,
            neighbors=settings.neighbors,
            policy=TierPolicy.of_hours(
                serving.tiers, serving.ttl_hours, serving.max_user_age_hours, serving.min_similarity
            ),
        )
        previous = previous_manifest(storage, before_micros=micros(run.as_of))
        limits = Limits(settings.min_pairs_ratio, settings.min_users_ratio, settings.max_norm_drift)
        check_content(manifest, totals)
        check_against_previous(manifest, previous, limits)
        storage.write_text(f"{staging}/{MANIFEST}", manifest.to_json())
        newest = fresh_pair_embeddings(run.tables, run.as_of, serving.ttl_hours, version)
        check_lookups(root / staging, manifest, newest, means, lists, serving, settings.sample)
        if previous is not None:
            reused = reuse_files(storage, staging, manifest, previous)
        live = publish(storage, staging, manifest)
    except SnapshotError as error:
        raise RunFailed(f"export_snapshot {run.slice}: {error}; CURRENT was left alone") from None
    finally:
        storage.remove_folder(staging)
        if groups is not None:
            groups.unpersist()
    if not manifest.pairs:
        log.warning("export_snapshot %s: snapshot %s has no pairs", run.slice, manifest.snapshot_id)
    run.write(snapshot_row(run, manifest), "snapshots")
    log.info(
        "export_snapshot %s: %s %s",
        run.slice,
        manifest.snapshot_id,
        "is live" if live else "is older than the live one",
    )
    if settings.push_to and live:
        pushed = push(root, manifest.snapshot_id, settings.push_to)
        log.info("export_snapshot %s: %s bytes sent to %s", run.slice, pushed.bytes, settings.push_to)
    return Report(
        rows_in=totals.pairs + totals.means,
        rows_out=manifest.pairs + manifest.users,
        metrics={
            "pairs": manifest.pairs,
            "users_own": manifest.users_own,
            "users_neighbor": manifest.users_neighbor,
            "users_cold": manifest.users_cold,
            "bytes": manifest.total_bytes,
            "bytes_reused": reused,
            "seconds": seconds,
            "shards": shards,
            "live": float(live),
        },
    )


def snapshot_row(run: Run, manifest: Manifest) -> DataFrame:
    """The row of `snapshots`. status is live for every published one: the logical time decides which answers when (the
    greatest live_from up to then), so a row is retired once a later one's live_from has come; nothing is updated."""
    import hashlib

    delay = timedelta(minutes=run.config.serving.publish_delay_minutes)
    digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
    return run.spark.range(1).select(
        F.lit(manifest.snapshot_id).alias("snapshot_id"),
        F.lit(manifest.model_version).alias("model_version"),
        ts(run.as_of + delay).alias("live_from"),
        F.lit("live").alias("status"),
        F.lit(manifest.pairs).cast("bigint").alias("pairs"),
        F.lit(manifest.users_own).cast("bigint").alias("users_own"),
        F.lit(manifest.users_neighbor).cast("bigint").alias("users_neighbor"),
        F.lit(manifest.users_cold).cast("bigint").alias("users_cold"),
        F.lit(manifest.total_bytes).cast("bigint").alias("bytes"),
        F.lit(digest).alias("manifest_sha256"),
    )


if __name__ == "__main__":
    main("export_snapshot")
