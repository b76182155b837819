"""Measures what the embeddings are worth to a small online model, against the foundation model itself.

Reads training_rows that were shown with event_time in [as_of - train_hours - eval_hours, as_of): the last eval_hours
evaluate, the rows before train. Trains one small model per feature set and seed on identical rows (base, soft-label
distillation, embeddings, both, and controls), asks the foundation model for its own prediction with the history at each
slice's start and up to the row itself (the ceilings), takes the simulated world's true probabilities where there are
any, and writes log loss, NE, RLL, AUC, calibration and transfer ratio with intervals to vm_evaluations. Sweeps vary
what was served: see jobs/common/vm_sweeps.py; fm_age states the foundation model's age. Rows are a sample by hash of at
most about max_rows, which is what the driver holds in memory.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from jobs.common.clock import micros
from jobs.common.config import Section
from jobs.common.errors import UserError
from jobs.common.evaluations import Stated, write_figures
from jobs.common.main import main
from jobs.common.runs import Report, Run
from jobs.common.vm_data import Span, choose_span, load_rows
from jobs.common.vm_rows import Collected

if TYPE_CHECKING:
    from solaris_udf.vertical_rows import Rows

SETS = ("base", "distillation", "embeddings", "both", "shuffled", "flags_only", "user_only", "pair_only")
# Every row with its own pair's embedding, as an unlimited budget would have it.
EVERY_PAIR = "every_pair"
NEEDS_FM = ("distillation", "both", EVERY_PAIR)


class Settings(Section):
    """The [evaluate_uplift] section."""

    section = "evaluate_uplift"
    train_hours: float = Field(24.0, gt=0, description="Hours of rows that train, just before those that evaluate")
    eval_hours: float = Field(12.0, gt=0, description="Hours of rows that evaluate, up to as_of")
    seeds: int = Field(5, ge=1, description="Models trained of each kind, with seeds 0, 1, ...")
    feature_sets: tuple[str, ...] = Field(
        (*SETS[:7], EVERY_PAIR), description=f"Of {', '.join((*SETS, EVERY_PAIR))}; base is always there"
    )
    coverage_sweep: tuple[float, ...] = Field(
        (0.2, 0.5, 1.0),
        description="Shares of rows that keep their vectors: each row's own pair's, or without the foundation model's "
        "folder what was served",
    )
    budget_sweep: tuple[float, ...] = Field(
        (), description="Shares of the budget that was spent: pairs that they would not have bought count as not served"
    )
    tier_sweep: bool = Field(
        False, description="Measure what each tier adds to those before it, on all rows and on its own"
    )
    ttl_sweep: tuple[float, ...] = Field((), description="Hours after which a pair counts as not served")
    codec_sweep: bool = Field(False, description="Measure with vectors stored as int8 too")
    max_rows: int = Field(200_000, ge=1, description="About how many rows at most are sampled and held on the driver")
    min_rows: int = Field(200, ge=2, description="Fewer rows than this to train or to evaluate on are an error")
    epochs: int = Field(4, ge=1, description="Most epochs; the one that is best on the latest training rows is kept")
    batch: int = Field(512, ge=1, description="Rows a training step")
    counter_hours: float = Field(72.0, gt=0, description="The items' counters look back this long")
    replicates: int = Field(1000, ge=10, description="Bootstrap draws")

    @model_validator(mode="after")
    def _known(self) -> "Settings":
        known = (*SETS, EVERY_PAIR)
        unknown = [name for name in self.feature_sets if name not in known]
        if unknown:
            raise ValueError(f"unknown feature sets {unknown}; known: {', '.join(known)}")
        for name in ("coverage_sweep", "budget_sweep"):
            shares = getattr(self, name)
            if any(not 0 < share <= 1 for share in shares):
                raise ValueError(f"a share of {name} is not in (0, 1]: {list(shares)}")
        return self


def split_rows(found: Collected, span: Span, split: datetime, least: int) -> tuple[Collected, Collected]:
    """(those that train, those that evaluate). Raises UserError that names what is missing."""
    if span.start >= split:
        raise UserError(
            f"the foundation model that served these rows knows those before {span.start.isoformat()}, so there are "
            f"none to train on before {split.isoformat()}: evaluate a later slice, or make evaluate_uplift.eval_hours "
            "smaller"
        )
    parts = []
    for name, begin, end, keep in (
        ("train", span.start, split, found.event_time < micros(split)),
        ("evaluate", split, span.as_of, found.event_time >= micros(split)),
    ):
        part = found.take(keep)
        clicks = int(part.rows.label.sum())
        if len(part.rows) < least or not 0 < clicks < len(part.rows):
            raise UserError(
                f"{len(part.rows)} shown rows with {clicks} clicks to {name} on, in [{begin.isoformat()}, "
                f"{end.isoformat()}); at least {least} with clicks and without are needed: run join_features for more "
                "slices, or change evaluate_uplift.train_hours, eval_hours or min_rows"
            )
        parts.append(part)
    return parts[0], parts[1]


def run(run: Run, settings: Settings) -> Report:
    """Trains, evaluates, and writes this slice's figures."""
    from jobs.common.item_table import write_item_table
    from jobs.common.vm_sweeps import sweep_figures, sweep_variants
    from solaris_udf.uplift import BASE

    split = run.as_of - timedelta(hours=settings.eval_hours)
    span = choose_span(run, split - timedelta(hours=settings.train_hours))
    found = load_rows(
        run,
        span,
        Path(write_item_table(run)),
        max_rows=settings.max_rows,
        counter_hours=settings.counter_hours,
        foundation=True,
        budget_shares=settings.budget_sweep,
    )
    train_part, eval_part = split_rows(found, span, split, settings.min_rows)
    sets = [name for name in ("base", *settings.feature_sets) if span.folder is not None or name not in NEEDS_FM]
    sets = list(dict.fromkeys(sets))
    variants = sweep_variants(
        settings, run.config.serving.tiers, (train_part, eval_part), every_pair=span.folder is not None
    )
    with _progress(settings.seeds * (len(sets) + len(variants))) as advance:
        served = train_part.rows, eval_part.rows
        full = (train_part.every_pair(), eval_part.every_pair()) if span.folder is not None else served
        predictions = {("vm", name): _predict(name, *served, settings, advance) for name in sets if name != EVERY_PAIR}
        if EVERY_PAIR in sets:
            predictions["vm", EVERY_PAIR] = _predict("embeddings", *full, settings, advance)
        varied = []
        for variant in variants:
            train_rows, eval_rows = full if variant.every_pair else served
            made = variant.make(train_rows, 0), variant.make(eval_rows, 1)
            varied.append((variant, _predict("embeddings", *made, settings, advance)))
    rows = _main_rows(predictions, eval_part, settings, span)
    if span.trained is not None:
        rows += by_age(rows, split - span.trained)
    rows += sweep_figures(varied, predictions[BASE], eval_part, list(range(settings.seeds)), settings.replicates)
    written = write_figures(run, rows, len(eval_part.rows))
    return Report(
        rows_in=len(train_part.rows) + len(eval_part.rows),
        rows_out=written,
        metrics={
            "train_rows": len(train_part.rows),
            "eval_rows": len(eval_part.rows),
            "served": float((eval_part.rows.has_pair | eval_part.rows.has_user).mean()),
            **_headline(rows),
        },
    )


def _predict(name: str, train_rows: "Rows", eval_rows: "Rows", settings: Settings, advance: Callable[[], None]) -> Any:
    """Predictions [seeds, n] of one feature set's models."""
    import numpy as np

    from solaris_udf.vertical_model import FEATURE_SETS, Schedule, train

    schedule = Schedule(epochs=settings.epochs, batch=settings.batch)
    found = []
    for seed in range(settings.seeds):
        found.append(train(train_rows, FEATURE_SETS[name], seed=seed, schedule=schedule).predict(eval_rows))
        advance()
    return np.stack(found)


def _main_rows(
    predictions: dict[tuple[str, str], Any], part: Collected, settings: Settings, span: Span
) -> list[Stated]:
    import numpy as np

    from solaris_udf.uplift import FM, FRESH, Figure, figures

    every = dict(predictions)
    notes: list[Figure] = []
    for key, said in ((FM, part.rows.soft.astype(np.float64)), (FRESH, part.fresh)):
        refused = int(np.isnan(said).sum())
        if span.folder is None:
            missing = f"model {span.model_version} is not below models/foundation, nor named by embed_pairs.model"
            notes.append(Figure(*key, -1, "log_loss", None, note=missing))
        elif refused:
            notes.append(Figure(*key, -1, "log_loss", None, note=f"the model refused {refused} rows"))
        else:
            every[key] = said[None]
    if np.isfinite(part.truth).all():
        every["truth", ""] = part.truth[None]
    found = figures(part.rows.label, part.user, every, list(range(settings.seeds)), settings.replicates)
    return [("main", "", figure) for figure in [*found, *notes]]


def by_age(main: list[Stated], age: timedelta) -> list[Stated]:
    """The embeddings' figures once more, by the foundation model's age when the first evaluated row came, in hours:
    the evaluations of one model, slice after slice, are its sweep of ages."""
    hours = f"{age / timedelta(hours=1):g}"
    return [
        ("fm_age", hours, figure)
        for _, _, figure in main
        if (figure.model, figure.feature_set, figure.seed) == ("vm", "embeddings", -1)
    ]


def _headline(rows: list[Stated]) -> dict[str, float]:
    return {
        f"{figure.metric}_{figure.feature_set}": figure.value
        for sweep, _, figure in rows
        if sweep == "main"
        and figure.model == "vm"
        and figure.seed == -1
        and figure.value is not None
        and figure.metric in ("ne", "rll", "transfer_ratio")
    }


def _progress(total: int) -> AbstractContextManager[Callable[[], None]]:
    """A bar on a terminal; nothing elsewhere. Yields what to call after each trained model."""
    if not sys.stderr.isatty():
        return nullcontext(lambda: None)
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def shown() -> Any:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("models trained", total=total)
            yield lambda: bar.advance(task)

    return shown()


if __name__ == "__main__":
    main("evaluate_uplift")
