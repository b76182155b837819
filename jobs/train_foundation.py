"""train_foundation: trains the reference foundation model and exports it to models/foundation/<slice>/.

Reads the shown rows of ranking_log, conversions of label_events and the items, all as of the run. Each shown row is an
example: the label is whether it was clicked, the input its user's history strictly before the row. The last part of the
time validates and stops training early. A run that was killed resumes from its last finished epoch.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.clock import micros, slice_of, ts
from jobs.common.config import Section, on_disk
from jobs.common.errors import RunFailed
from jobs.common.item_table import write_item_table
from jobs.common.log import log_before
from jobs.common.main import main
from jobs.common.models import model_folder
from jobs.common.runs import Report, Run
from jobs.common.tables import Tables

if TYPE_CHECKING:
    from solaris_udf.foundation.training import Plan, Trained

log = logging.getLogger("solaris")
CONVERSION = "conversion"
# Hash buckets of users for sampling; the share kept is exact to one in a million.
SAMPLE_BUCKETS = 1_000_000


class Settings(Section):
    """The [train_foundation] section."""

    section = "train_foundation"
    size: Literal["tiny", "demo", "large"] = Field("demo", description="Size of the model")
    embedding_dim: int = Field(32, ge=1, le=4096, description="Dimensions of the stored embedding")
    history_days: float = Field(30.0, gt=0, description="How far back the log is read")
    max_rows: int = Field(2_000_000, ge=1, description="About how many shown rows to train on: a sample of users")
    epochs: int = Field(3, ge=1, description="Most passes over the rows")
    patience: int = Field(1, ge=1, description="Passes without a better validation loss after which training stops")
    batch: int = Field(64, ge=1, description="Requests a training step")
    learning_rate: float = Field(3e-3, gt=0, description="Peak of the learning rate")
    id_dropout: float = Field(0.5, ge=0, lt=1, description="Share of user ids hidden in training, against overfitting")
    validation: float = Field(0.1, gt=0, lt=1, description="Share of the rows, the latest, that training is stopped by")
    conversion_hours: float = Field(24.0, ge=0, description="Until this long after a row its conversion is unknown")
    workers: int = Field(1, ge=1, description="Training processes; more than one go through TorchDistributor")
    threads: int = Field(
        0, ge=0, description="CPU threads a process; 0: torch's own choice. Repeatable to the bit with 1"
    )
    seed: int = Field(0, ge=0, description="Seed of weights, order and dropout")


def sampled_users(rows: DataFrame, share: float, seed: int) -> DataFrame:
    """The rows of a `share` of all users, chosen by a hash of the id: the same users whatever the partitioning."""
    if share >= 1:
        return rows
    bucket = F.pmod(F.xxhash64("user_id", F.lit(seed)), F.lit(SAMPLE_BUCKETS))
    return rows.where(bucket < round(share * SAMPLE_BUCKETS))


def labels_by(tables: Tables, as_of: datetime) -> DataFrame:
    """label_events that had arrived by as_of."""
    return tables.read("label_events").where((F.col("slice") <= slice_of(as_of)) & (F.col("arrived_at") <= ts(as_of)))


def with_conversions(rows: DataFrame, label_events: DataFrame) -> DataFrame:
    """Adds `converted`: whether the row has a conversion among these label events."""
    converted = (
        label_events.where((F.col("label") == CONVERSION) & (F.col("value") > 0))
        .select("request_id", "item_id", F.lit(True).alias("converted"))
        .distinct()
    )
    joined = rows.join(converted, on=["request_id", "item_id"], how="left")
    return joined.withColumn("converted", F.coalesce("converted", F.lit(False)))


def user_sequences(rows: DataFrame) -> DataFrame:
    """One row per user with a shown row: its shown rows and its requests, both sorted by time (micros UTC).

    events: array of (time, item_id, clicked, converted); requests: array of (time, scored), scored counting rows.
    """
    time = F.unix_micros("event_time").alias("time")
    event = F.struct(time, "request_id", "item_id", "clicked", "converted")
    by_request = (
        rows.repartition("user_id")  # one shuffle serves both groupings
        .groupBy("user_id", "request_id", time)
        .agg(F.count("*").alias("scored"), F.collect_list(F.when(F.col("shown"), event)).alias("shown"))
    )
    return (
        by_request.groupBy("user_id")
        .agg(
            F.array_sort(F.flatten(F.collect_list("shown"))).alias("shown"),
            F.array_sort(F.collect_list(F.struct("time", "request_id", "scored"))).alias("scored"),
        )
        .where(F.size("shown") > 0)
        .select(
            "user_id",
            F.transform("shown", lambda x: F.struct(x.time, x.item_id, x.clicked, x.converted)).alias("events"),
            F.transform("scored", lambda x: F.struct(x.time, x.scored)).alias("requests"),
        )
    )


def run(run: Run, settings: Settings) -> Report:
    """Writes the examples to local files, trains on them, exports the model."""
    rows = log_before(run.tables, run.as_of, settings.history_days * 24)
    shown = rows.where("shown").count()
    if not shown:
        raise RunFailed(
            f"train_foundation {run.slice}: ranking_log has no shown row in the "
            f"{settings.history_days:g} days before; ingest a log first"
        )
    labels = labels_by(run.tables, run.as_of)
    has_conversions = bool(labels.where(F.col("label") == CONVERSION).limit(1).count())
    sample = sampled_users(rows, settings.max_rows / shown, settings.seed)
    sample = with_conversions(sample, labels) if has_conversions else sample.withColumn("converted", F.lit(False))
    staging = Path(run.config.path("staging", "train_foundation", run.slice))
    user_sequences(sample).write.mode("overwrite").parquet(on_disk(staging / "users"))
    mature = run.as_of - timedelta(hours=settings.conversion_hours)
    trained = _train(run, settings, staging, write_item_table(run), has_conversions, micros(mature))
    shutil.rmtree(staging)
    log.info(
        "foundation model %s: validation NE %.4f, logistic baseline %.4f, base rate 1, on %s rows",
        trained.description.version,
        trained.ne,
        trained.baseline_ne,
        trained.validation_rows,
    )
    figures = {
        "train_rows": trained.train_rows,
        "validation_rows": trained.validation_rows,
        "epochs": trained.epochs,
        "best_epoch": trained.best_epoch,
        "validation_log_loss": trained.log_loss,
        "validation_ne": trained.ne,
        "baseline_ne": trained.baseline_ne,
        "reconstruction_error": trained.reconstruction,
        "flops_per_user": trained.description.flops_per_user,
        "flops_per_pair": trained.description.flops_per_pair,
    }
    return Report(
        rows_in=shown,
        rows_out=trained.train_rows + trained.validation_rows,
        metrics={name: value for name, value in figures.items() if value == value},
    )  # NaN: not defined


def plan_of(settings: Settings) -> "Plan":
    """The settings that decide the model."""
    from solaris_udf.foundation.training import Plan

    names = {field.name for field in fields(Plan)} & set(Settings.model_fields)
    return Plan(**{name: getattr(settings, name) for name in names})


def _train(
    run: Run, settings: Settings, staging: Path, items: Path, conversions: bool, mature_before: int
) -> "Trained":
    # Read once, when torch loads. Waiting threads that spin instead of sleeping make training many times slower as soon
    # as anything else wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from solaris_udf.foundation.process import train_files

    arguments: dict[str, Any] = {
        "users": str(staging / "users"),
        "items": str(items),
        "folder": str(model_folder(run.config, "foundation", run.as_of)),
        "plan": asdict(plan_of(settings)),
        "conversions": conversions,
        "mature_before": mature_before,
        "threads": settings.threads,
    }
    if settings.workers == 1:
        trained = train_files(**arguments, progress=bar if sys.stderr.isatty() else None)
    else:
        import torch
        from pyspark.ml.torch.distributor import TorchDistributor

        local = (run.spark.sparkContext.master or "").startswith("local")
        trained = TorchDistributor(
            num_processes=settings.workers, local_mode=local, use_gpu=torch.cuda.is_available()
        ).run(_train_worker, arguments)
    assert trained is not None
    return trained


def _train_worker(arguments: dict[str, Any]) -> "Trained | None":
    """What each process of TorchDistributor runs."""
    from solaris_udf.foundation.process import train_files

    return train_files(**arguments, distributed=True)


def bar(steps: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """The steps, with a progress bar."""
    from rich.progress import track

    yield from track(steps, description=label, total=total, transient=True)


if __name__ == "__main__":
    main("train_foundation")
