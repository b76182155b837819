"""Keeps tables and snapshots small: deletes old slices, compacts small files, vacuums, and removes old snapshots.

With maintain_tables.dry_run = true it logs what it would do and changes nothing. What the jobs, the live snapshot,
pinned snapshots and running readers need is never removed, whatever the retention says. Logical time decides which
slices and snapshots are old; only VACUUM and readers' leases go by the wall clock, as file times do.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

from delta.tables import DeltaTable
from pydantic import Field, field_validator, model_validator
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.common.config import Section
from jobs.common.errors import RunFailed
from jobs.common.main import main
from jobs.common.retention import KEPT_WHOLE, first_kept_slice, slice_of_snapshot
from jobs.common.runs import Report, Run
from jobs.common.snapshots import gc
from schemas import TABLES

log = logging.getLogger("solaris")
DELTA_SAFE_HOURS = 168.0


class Settings(Section):
    """The [maintain_tables] section."""

    section = "maintain_tables"
    dry_run: bool = Field(False, description="Only say what would be done")
    tables: tuple[str, ...] = Field((), description="Only these tables; empty: all")
    retention_days: dict[str, float] = Field(
        default_factory=lambda: {
            "candidate_pairs": 14.0,
            "pair_embeddings": 14.0,
            "user_sums": 7.0,
            "user_embeddings": 30.0,
            "user_clusters": 30.0,
            "user_neighbors": 30.0,
            "user_histories": 30.0,
            "training_rows": 30.0,
            "rejected_rows": 30.0,
        },
        description="Older slices are deleted, by table; a table without an entry keeps all",
    )
    max_files_per_slice: int = Field(4, ge=1, description="A finished slice with more files is compacted")
    target_file_mb: int = Field(256, ge=1, description="Compaction fills files up to this size")
    vacuum_hours: float = Field(DELTA_SAFE_HOURS, gt=0, description="VACUUM leaves files unreferenced for less")
    allow_short_vacuum: bool = Field(False, description="Let vacuum_hours go below 168, to min_vacuum_hours")
    min_vacuum_hours: float = Field(24.0, ge=1, description="The longest that a reader or a writer may run")
    keep_snapshots: int = Field(28, ge=1, description="The newest snapshots that stay")
    snapshot_days: float = Field(7.0, ge=0, description="Snapshots live in this many days stay, for audits and joins")
    lease_hours: float = Field(6.0, gt=0, description="A reader's lease not renewed for this long has ended")

    @field_validator("tables")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in TABLES]
        if unknown:
            raise ValueError(f"unknown tables {unknown}; tables: {', '.join(TABLES)}")
        return names

    @field_validator("retention_days")
    @classmethod
    def _deletable(cls, days: dict[str, float]) -> dict[str, float]:
        for name, value in days.items():
            if name not in TABLES:
                raise ValueError(f"unknown table {name!r}; tables: {', '.join(TABLES)}")
            if name in KEPT_WHOLE:
                raise ValueError(f"{name} can't be cut by age: {KEPT_WHOLE[name]}")
            if not value > 0:
                raise ValueError(f"{name}: {value} is no number of days")
        return days

    @model_validator(mode="after")
    def _vacuum_is_safe(self) -> "Settings":
        floor = self.min_vacuum_hours if self.allow_short_vacuum else DELTA_SAFE_HOURS
        if self.vacuum_hours < floor:
            fix = "" if self.allow_short_vacuum else " (Delta's own limit; allow_short_vacuum = true lifts it)"
            raise ValueError(f"vacuum_hours = {self.vacuum_hours} is below {floor}{fix}")
        return self


@dataclass(frozen=True)
class TablePlan:
    """What is to be done to one table."""

    name: str
    delete_before: str | None  # slices before this go; None: none do
    deleted_slices: list[str]
    compact: list[str]  # slices; one empty string stands for a table without slices
    files: int  # in those slices


def plan_table(run: Run, settings: Settings, name: str, live_slice: str | None) -> TablePlan:
    """Decides from the table's file list, which Delta keeps in its log: no data is read."""
    rows = run.tables.read(name)
    files = Counter(str(Path(file).parent) for file in map(unquote, rows.inputFiles()))
    slices = {folder: _slice_in(folder) for folder in files}
    first_kept = None
    if name in settings.retention_days:
        known = {value for value in slices.values() if value}
        first_kept = first_kept_slice(name, known, run.as_of, live_slice, settings.retention_days[name], run.config)
    if name == "user_histories" and first_kept is not None:
        # The state at a time is read from the checkpoint before it.
        checkpoint = rows.where((F.col("slice") <= first_kept) & F.col("checkpoint")).agg(F.max("slice")).first()
        first_kept = checkpoint[0] if checkpoint else None
    gone = sorted({value for value in slices.values() if value and first_kept and value < first_kept})
    crowded = {
        folder: count
        for folder, count in files.items()
        if count > settings.max_files_per_slice and slices[folder] not in gone and slices[folder] < run.slice
    }
    compact = sorted({slices[folder] for folder in crowded})
    return TablePlan(name, first_kept if gone else None, gone, compact, sum(crowded.values()))


def _slice_in(folder: str) -> str:
    parts = [part.removeprefix("slice=") for part in folder.split("/") if part.startswith("slice=")]
    return parts[0] if parts else ""


def maintain(run: Run, settings: Settings, plan: TablePlan) -> dict[str, float]:
    """Carries out the plan of one table and vacuums it. Returns the figures."""
    table = DeltaTable.forPath(run.spark, run.tables.path(plan.name))
    figures = {"slices_deleted": float(len(plan.deleted_slices))}
    if plan.delete_before is not None:
        table.delete(F.col("slice") < plan.delete_before)  # whole partitions: no file is rewritten
    if plan.compact:
        try:
            figures |= _compact(run.spark, table, plan, settings.target_file_mb << 20)
        except PySparkException as error:
            # A retry or a backfill was writing one of the slices. It wins; the next run compacts.
            if "CONCURRENT" not in (error.getCondition() or str(error)).upper():
                raise
            log.warning("%s was not compacted: %s", plan.name, str(error).splitlines()[0])
            figures["conflicts"] = 1.0
    if _may_hold_old_files(table, settings.vacuum_hours):
        _vacuum(run.spark, run.tables.path(plan.name), settings.vacuum_hours)
        figures["vacuumed"] = 1.0
    return figures


def _compact(spark: SparkSession, table: DeltaTable, plan: TablePlan, file_bytes: int) -> dict[str, float]:
    size = str(file_bytes)
    with _spark_settings(
        spark,
        {
            "spark.databricks.delta.optimize.minFileSize": size,
            "spark.databricks.delta.optimize.maxFileSize": size,
        },
    ):
        builder = table.optimize()
        if plan.compact != [""]:
            builder = builder.where("slice IN ({})".format(", ".join(f"'{name}'" for name in plan.compact)))
        metrics = builder.executeCompaction().select("metrics.numFilesAdded", "metrics.numFilesRemoved").first()
    assert metrics is not None
    return {"files_removed": float(metrics.numFilesRemoved), "files_added": float(metrics.numFilesAdded)}


def _may_hold_old_files(table: DeltaTable, hours: float) -> bool:
    """Whether the table is old enough to have something to vacuum: spares listing the files of young tables."""
    created = table.detail().select(F.unix_micros("createdAt").alias("at")).first()
    assert created is not None
    return datetime.fromtimestamp(created.at / 1e6, UTC) < wall_clock() - timedelta(hours=hours)


def wall_clock() -> datetime:
    """Now. Only VACUUM needs it."""
    return datetime.now(UTC)


def _vacuum(spark: SparkSession, path: str, hours: float) -> None:
    settings = {
        "spark.databricks.delta.retentionDurationCheck.enabled": str(hours >= DELTA_SAFE_HOURS).lower(),
        # VACUUM lists folders in as many tasks as this says, and Spark's default is 10,000.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(4 * spark.sparkContext.defaultParallelism),
    }
    with _spark_settings(spark, settings):
        spark.sql(f"VACUUM delta.`{path}` RETAIN {hours:f} HOURS")


@contextmanager
def _spark_settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    before = {key: spark.conf.get(key, None) for key in values}
    try:
        for key, value in values.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


def collect_snapshots(run: Run, settings: Settings) -> dict[str, float]:
    """Removes the snapshots that nobody needs, and what killed exports and removals left behind."""
    found = gc(
        run.config.path("snapshots"),
        settings.keep_snapshots,
        days=settings.snapshot_days,
        as_of=run.as_of,
        lease_hours=settings.lease_hours,
        abandoned_hours=settings.min_vacuum_hours,
        dry_run=settings.dry_run,
    )
    for name in [*found.snapshots, *found.leftovers]:
        log.info("%s snapshot folder %s", "would remove" if settings.dry_run else "removed", name)
    if found.snapshots and not settings.dry_run and run.tables.exists("snapshots"):
        slices = sorted({slice_of_snapshot(name) or "" for name in found.snapshots})
        DeltaTable.forPath(run.spark, run.tables.path("snapshots")).update(
            F.col("slice").isin(slices) & F.col("snapshot_id").isin(found.snapshots), {"status": F.lit("retired")}
        )
    return {"snapshots_removed": float(len(found.snapshots)), "snapshots_kept": float(found.kept)}


def _current(run: Run) -> str | None:
    """The live snapshot's id; None if none was ever published. A CURRENT that can't be read stops everything."""
    from solaris_udf.snapshot.errors import SnapshotError
    from solaris_udf.snapshot.publish import read_current
    from solaris_udf.snapshot.storage import LocalStorage

    try:
        return read_current(LocalStorage(run.config.path("snapshots")))
    except SnapshotError as error:
        raise RunFailed(f"maintain_tables {run.slice}: {error}; nothing was changed") from None


def run(run: Run, settings: Settings) -> Report:
    """Plans every table, then carries the plans out unless this is a dry run."""
    current = _current(run)
    live_slice = slice_of_snapshot(current) if current else None
    names = [name for name in settings.tables or TABLES if run.tables.exists(name)]
    plans = [plan_table(run, settings, name, live_slice) for name in names]
    totals: Counter[str] = Counter()
    for plan in plans:
        if plan.deleted_slices or plan.compact:
            log.info(
                "%s%s: delete %s slices before %s, compact %s files of %s slices",
                "would, " if settings.dry_run else "",
                plan.name,
                len(plan.deleted_slices),
                plan.delete_before,
                plan.files,
                len(plan.compact),
            )
        if settings.dry_run:
            figures = {"slices_deleted": float(len(plan.deleted_slices)), "files_removed": float(plan.files)}
        else:
            figures = maintain(run, settings, plan)
        totals.update(figures)
    totals.update(collect_snapshots(run, settings))
    return Report(metrics={"dry_run": float(settings.dry_run), "tables": float(len(names)), **totals})


if __name__ == "__main__":
    main("maintain_tables")
