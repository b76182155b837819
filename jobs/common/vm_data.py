"""The rows that a small online model is trained and judged on: chosen honestly, sampled, and brought to the driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.alignment import load_alignment
from jobs.common.clock import as_of_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.models import declared, model_roots, models_until, trained_at
from jobs.common.runs import Run
from jobs.common.vm_budget import with_bought_at
from jobs.common.vm_rows import (
    Collected,
    collect,
    item_counts,
    shown_rows,
    states_at,
    states_before,
    window_starts,
    with_counters,
)
from jobs.common.world_files import click_truth

SAMPLE_STEPS = 1_000_000


@dataclass(frozen=True)
class Span:
    """Rows in [start, as_of), read with the vectors of one model version. folder: that model's, None if it is not here.

    rows: how many shown rows there are. trained: when the model was, None where nobody knows.
    """

    start: datetime
    as_of: datetime
    model_version: str
    folder: Path | None
    rows: int
    trained: datetime | None = None


def choose_span(run: Run, start: datetime) -> Span:
    """The rows of [start, as_of) that can be used honestly.

    Vectors of one model version only, the one that served most rows. The foundation model was trained on what came
    before its slice, so rows before that are left out: it has seen their labels. Of one that embed_pairs.model names
    that time is not known.

    Raises UserError if there are no shown rows, or none that was served a vector.
    """
    time = f"[{start.isoformat()}, {run.as_of.isoformat()})"
    versions = (
        shown_rows(run.tables, start, run.as_of, run.config.window.hours)
        .groupBy("model_version")
        .agg(F.count(F.lit(1)).alias("rows"), F.sum((F.col("tier") != "none").cast("bigint")).alias("served"))
        .collect()
    )
    total = sum(row.rows for row in versions)
    if not total:
        raise UserError(f"training_rows has no shown rows in {time}; run join_features for the slices of that time")
    served = [row for row in versions if row.model_version is not None and row.served]
    if not served:
        raise UserError(
            f"none of the {total} shown rows in {time} was served a vector; "
            "run predict_pairs, embed_pairs and export_snapshot for the slices before them"
        )
    version = max(served, key=lambda row: (row.served, row.model_version)).model_version
    folder = model_of_version(run, version)
    since = None if folder is None else trained_at(run.config, folder)
    trained = None if since is None else as_of_of(since)
    return Span(start if trained is None else max(start, trained), run.as_of, version, folder, total, trained)


def model_of_version(run: Run, version: str) -> Path | None:
    """The folder of the foundation model of that version, the earliest if it was trained twice; None if not here."""
    folders = reversed(models_until(run.config, "foundation", run.as_of))
    return next((folder for folder in folders if declared(run.config, folder).version == version), None)


def sampled(rows: DataFrame, total: int, most: int) -> DataFrame:
    """About `most` of the rows at most, whole requests, always the same ones."""
    if total <= most:
        return rows
    place = F.pmod(F.xxhash64(F.lit("evaluate"), "request_id"), F.lit(SAMPLE_STEPS))
    return rows.where(place < F.lit(int(SAMPLE_STEPS * most / total)))


def foundation_says(states: DataFrame, folder: Path, items_path: Path, config: Config) -> DataFrame:
    """(user_id, at, item_id, click, embedding): the foundation model's click probability, and its vector as float16.

    states: user_id, at, item_ids and the history's columns. Null where the model refused a pair.
    """
    from solaris_udf.foundation.udf import OUTPUT_DDL, embed_udf

    description = declared(config, folder)
    heads, aligned = description.heads, load_alignment(config, description.version)
    place = heads.index("click") if "click" in heads else 0
    rotation = aligned.matrix if aligned else None
    embed = embed_udf(
        folder,
        items_path,
        threads=config.spark.task_cpus,
        logits=True,
        roots=model_roots(config),
        rotation=rotation,
    )
    answered = states.mapInArrow(embed, OUTPUT_DDL)
    logit = F.get("logits", F.lit(place)).cast("double")
    return answered.select("user_id", "at", "item_id", (1 / (1 + F.exp(-logit))).alias("click"), "embedding")


def load_rows(
    run: Run,
    span: Span,
    items_path: Path,
    *,
    max_rows: int,
    counter_hours: float,
    foundation: bool,
    budget_shares: Sequence[float] = (),
) -> Collected:
    """A sample of the span's shown rows with their counters, on the driver; at most about max_rows.

    budget_shares: what bought_at tells apart. With foundation also what the foundation model itself says of each row
    (if its folder is here), and the simulated world's true probabilities where there are any.
    """
    from solaris_udf.foundation.items import ItemTable

    hours = run.config.window.hours
    starts = window_starts(run.tables, span.start, span.as_of, hours)
    rows = sampled(shown_rows(run.tables, span.start, span.as_of, hours), span.rows, max_rows)
    pairs = rows.groupBy("user_id", F.col("known_at").alias("at")).agg(
        F.sort_array(F.collect_set("item_id")).alias("item_ids")
    )
    states = states_at(run.tables, pairs, min(starts), max(starts)).persist()
    try:
        frame = with_counters(rows, states, item_counts(run.tables, starts, counter_hours))
        unknown = F.lit(None).cast("double")
        if foundation and span.folder is not None:
            known, now = (
                foundation_says(asked, span.folder, items_path, run.config)
                for asked in (states, states_before(run.tables, rows, min(starts), span.as_of))
            )
            known = known.withColumnsRenamed({"at": "known_at", "click": "soft", "embedding": "vector"})
            now = now.withColumnsRenamed({"at": "event_time", "click": "fresh"}).drop("embedding")
            frame = frame.join(known, ["user_id", "known_at", "item_id"], "left")
            frame = frame.join(now, ["user_id", "event_time", "item_id"], "left")
        else:
            frame = frame.withColumns({"soft": unknown, "fresh": unknown, "vector": F.lit(None).cast("binary")})
        chances = click_truth(run.spark, run.config) if foundation else None
        if chances is None:
            frame = frame.withColumn("truth", unknown)
        else:
            frame = frame.join(chances, ["request_id", "item_id"], "left")
        frame = with_bought_at(
            run.tables, frame, sorted(budget_shares), min(starts), max(starts), run.config.serving.ttl_hours
        )
        return collect(frame, ItemTable.open(items_path), span.model_version)
    finally:
        states.unpersist()
