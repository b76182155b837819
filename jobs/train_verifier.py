"""Trains the verifier: the model that says which pairs the ranker will score in the next window.

Looks from past reference times (as_of less 1, 2, ... windows): the candidates and features are what predict_pairs would
have had then, the label is how often the pair was scored in the window after, as far as it is known at as_of. Reads
ranking_log, items and pair_embeddings; writes models/verifier/SLICE (weights.safetensors, model.json). With too little
history it writes no model, and predict_pairs falls back to decayed frequency.
"""

import logging
from datetime import timedelta
from typing import Any

import numpy as np
from pydantic import Field, model_validator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.common.candidates import CandidateSettings, candidate_settings, candidates, horizon_of
from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.log import log_before
from jobs.common.main import main
from jobs.common.models import model_folder
from jobs.common.pair_features import FEATURES, features
from jobs.common.pair_statistics import HASH_RANGE, HOUR, PER_USER, View, open_view
from jobs.common.runs import Report, Run

log = logging.getLogger("solaris")
# Users are sampled first, so that features of a large log cost no more; then pairs, so that the examples are of more
# users.
EXAMPLES_PER_KEPT = 3


class Settings(Section):
    """The [train_verifier] section. What candidates are is set in [predict_pairs]."""

    section = "train_verifier"
    windows: int = Field(8, ge=2, description="Reference times: 1, 2, ... windows before as_of")
    validation_windows: int = Field(
        4,
        ge=1,
        description="The latest of them stop the training and calibrate; a whole day of them, because a calibration on "
        "one time of the day is off at others",
    )
    max_examples: int = Field(
        200_000, ge=1000, description="Examples are sampled to about this many, and fit the driver"
    )
    min_examples: int = Field(200, ge=1, description="With fewer, no model is trained")
    model: str = Field("mlp", pattern="^(mlp|logistic)$", description="mlp, or logistic: no hidden layer")
    hidden: tuple[int, ...] = Field((64, 32), description="Sizes of the hidden layers of an mlp")
    epochs: int = Field(30, ge=1)
    patience: int = Field(4, ge=1, description="Epochs without a better validation loss before it stops")
    batch_size: int = Field(2048, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    seed: int = 7
    threads: int = Field(1, ge=1, description="Threads of the training; more may change the last digits")

    @model_validator(mode="after")
    def _fits(self) -> "Settings":
        if self.validation_windows >= self.windows:
            raise ValueError(
                f"validation_windows {self.validation_windows} leaves none of {self.windows} windows to train on"
            )
        if self.model == "mlp" and not all(size >= 1 for size in self.hidden):
            raise ValueError(f"hidden {list(self.hidden)} must be sizes of 1 or more")
        return self


def labels(log_rows: DataFrame, as_of_micros: int, window_hours: float) -> DataFrame:
    """Scored rows per pair in the window after each reference time: at, user_id, item_id, label.

    log_rows: ranking_log rows before as_of. Windows end at as_of and follow each other, so a row is in exactly one.
    """
    window = round(window_hours * HOUR)
    back = F.floor((F.lit(as_of_micros - 1) - F.unix_micros("event_time")) / window).cast("bigint") + 1
    return log_rows.groupBy((F.lit(as_of_micros) - back * window).alias("at"), "user_id", "item_id").agg(
        F.count("*").alias("label")
    )


def examples(view: View, scored: DataFrame, settings: CandidateSettings) -> DataFrame:
    """Candidates with their features and label (0 if the pair was not scored)."""
    return (
        features(view, candidates(view, settings))
        .join(scored, [*PER_USER, "item_id"], "left")
        .select(*PER_USER, "item_id", *FEATURES, F.coalesce("label", F.lit(0)).alias("label"))
    )


def run(run: Run, settings: Settings) -> Report:
    """Builds examples, samples them, trains, saves."""
    window = run.config.window.hours
    shared = candidate_settings(run.config)
    times = [run.as_of - timedelta(hours=window * back) for back in range(1, settings.windows + 1)]
    scored = labels(log_before(run.tables, run.as_of, window * settings.windows), micros(run.as_of), window)
    recent = log_before(run.tables, run.as_of, shared.recent_hours)
    (pairs,) = recent.agg(F.approx_count_distinct(F.struct("user_id", "item_id"))).collect()[0]
    if not pairs:
        log.warning("train_verifier %s: the log is empty; no model is trained", run.slice)
        return Report(metrics={"examples": 0, "trained": 0})
    part_of_users = min(1.0, EXAMPLES_PER_KEPT * settings.max_examples / max(1, pairs * settings.windows))
    with open_view(run.tables, times, horizon_of(run.config, shared), run.as_of, part_of_users) as view:
        built = examples(view, scored, shared).persist()
        try:
            # One row a reference time.
            counts = built.groupBy("at").agg(F.count("*").alias("examples"), F.sum("label").alias("rows")).collect()
            total = sum(row.examples for row in counts)
            if total < settings.min_examples or len(counts) < 2:
                log.warning(
                    "train_verifier %s: %s examples of %s reference times are too few; no model is trained",
                    run.slice,
                    total,
                    len(counts),
                )
                return Report(rows_in=total, metrics={"examples": total, "trained": 0})
            # A young log has fewer windows; at least half of them train.
            later = sorted(row.at for row in counts)[-min(settings.validation_windows, len(counts) // 2) :]
            part = min(1.0, settings.max_examples / total)
            kept = F.pmod(F.xxhash64("at", "user_id", "item_id", F.lit(settings.seed)), F.lit(HASH_RANGE))
            # Bounded by max_examples, so that the driver can hold it.
            sample = built.where(kept < round(part * HASH_RANGE)).toArrow()
        finally:
            built.unpersist()
    metrics = _fit(run, settings, sample, later)
    metrics |= {
        "examples": total,
        "sampled": sample.num_rows,
        "reference_times": len(counts),
        "part_of_users": part_of_users,
    }
    return Report(rows_in=total, rows_out=int(metrics["trained"]), metrics=metrics)


def _fit(run: Run, settings: Settings, sample: Any, later: list[int]) -> dict[str, float]:
    """Trains on the sampled examples and saves the model. Returns its metrics, `trained` 0 if one class is missing."""
    from solaris_udf.verifier import save
    from solaris_udf.verifier_training import Training, train

    columns = {name: sample.column(name).to_numpy() for name in sample.column_names}
    order = np.lexsort((columns["item_id"], columns["user_id"], columns["at"]))  # rows come in no order
    values = np.column_stack([columns[name][order] for name in FEATURES])
    rows = columns["label"][order].astype(np.float64)
    validation = np.isin(columns["at"][order], later)
    training = Training(
        () if settings.model == "logistic" else settings.hidden,
        settings.epochs,
        settings.patience,
        settings.batch_size,
        settings.learning_rate,
        settings.weight_decay,
        settings.seed,
        settings.threads,
    )
    try:
        verifier = train(values, rows, validation, FEATURES, run.config.window.hours, training)
    except ValueError as error:
        log.warning("train_verifier %s: no model is trained: %s", run.slice, error)
        return {"trained": 0}
    save(verifier, model_folder(run.config, "verifier", run.as_of), {"run_id": run.run_id, "slice": run.slice})
    return {"trained": 1, **verifier.metrics}


if __name__ == "__main__":
    main("train_verifier")
