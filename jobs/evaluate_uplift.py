"""Measures what the embeddings are worth to a small online model, against the foundation model itself.

Reads training_rows that were shown with event_time in [as_of - train_hours - eval_hours, as_of): the last eval_hours
evaluate, the rows before train. Trains one small model per feature set and seed on identical rows (base, soft-label
distillation, embeddings, both, and controls), asks the foundation model for its own prediction with the history at each
slice's start (the ceiling), takes the simulated world's true probabilities where there are any, and writes log loss,
NE, RLL, AUC, calibration and transfer ratio with intervals to vm_evaluations. Rows are a sample by hash of at most
about max_rows, which is what the driver holds in memory.
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

SETS = ("base", "distillation", "embeddings", "both", "shuffled", "flags_only", "pair_only", "user_only")
NEEDS_FM = ("distillation", "both")


class Settings(Section):
    """The [evaluate_uplift] section."""

    section = "evaluate_uplift"
    train_hours: float = Field(24.0, gt=0, description="Hours of rows that train, just before those that evaluate")
    eval_hours: float = Field(12.0, gt=0, description="Hours of rows that evaluate, up to as_of")
    seeds: int = Field(5, ge=1, description="Models trained of each kind, with seeds 0, 1, ...")
    feature_sets: tuple[str, ...] = Field(SETS[:6], description=f"Of {', '.join(SETS)}; base is always there")
    coverage_sweep: tuple[float, ...] = Field((0.2, 0.5, 1.0), description="Shares of rows that keep what was served")
    max_rows: int = Field(200_000, ge=1, description="About how many rows at most are sampled and held on the driver")
    min_rows: int = Field(200, ge=2, description="Fewer rows than this to train or to evaluate on are an error")
    epochs: int = Field(4, ge=1, description="Most epochs; the one that is best on the latest training rows is kept")
    batch: int = Field(512, ge=1, description="Rows a training step")
    counter_hours: float = Field(72.0, gt=0, description="The items' counters look back this long")
    replicates: int = Field(1000, ge=10, description="Bootstrap draws")

    @model_validator(mode="after")
    def _known(self) -> "Settings":
        unknown = [name for name in self.feature_sets if name not in SETS]
        if unknown:
            raise ValueError(f"unknown feature sets {unknown}; known: {', '.join(SETS)}")
        if any(not 0 < share <= 1 for share in self.coverage_sweep):
            raise ValueError(f"a share of coverage_sweep is not in (0, 1]: {list(self.coverage_sweep)}")
        return self


def split_rows(found: Collected, span: Span, split: datetime, least: int) -> tuple[Collected, Collected]:
    """(those that train, those that evaluate). Raises UserError that names what is missing."""
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
    """Trains, evaluates, and writes this slice's figures of the sweeps main and coverage."""
    from jobs.common.item_table import write_item_table

    split = run.as_of - timedelta(hours=settings.eval_hours)
    span = choose_span(run, split - timedelta(hours=settings.train_hours))
    found = load_rows(
        run,
        span,
        Path(write_item_table(run)),
        max_rows=settings.max_rows,
        counter_hours=settings.counter_hours,
        foundation=True,
    )
    train_part, eval_part = split_rows(found, span, split, settings.min_rows)
    sets = [name for name in ("base", *settings.feature_sets) if span.folder is not None or name not in NEEDS_FM]
    sets = list(dict.fromkeys(sets))
    sweep = [share for share in settings.coverage_sweep if share < 1]
    with _progress(settings.seeds * (len(sets) + len(sweep))) as advance:
        predictions = {
            ("vm", name): _predict(name, train_part.rows, eval_part.rows, settings, advance) for name in sets
        }
        by_share = {
            share: _predict("embeddings", *_masked(train_part.rows, eval_part.rows, share), settings, advance)
            for share in sweep
        }
    rows = _main_rows(predictions, eval_part, settings, span) + _sweep_rows(by_share, predictions, eval_part, settings)
    written = write_figures(run, rows, len(eval_part.rows))
    served = float((eval_part.rows.has_pair | eval_part.rows.has_user).mean())
    return Report(
        rows_in=len(train_part.rows) + len(eval_part.rows),
        rows_out=written,
        metrics={
            "train_rows": len(train_part.rows),
            "eval_rows": len(eval_part.rows),
            "served": served,
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


def _masked(train_rows: "Rows", eval_rows: "Rows", share: float) -> tuple["Rows", "Rows"]:
    """Only a random share of the rows keeps what was served; of a smaller share, some of the same rows."""
    import numpy as np

    keep_train = np.random.default_rng(0).random(len(train_rows)) < share
    keep_eval = np.random.default_rng(1).random(len(eval_rows)) < share
    return train_rows.masked(keep_train), eval_rows.masked(keep_eval)


def _main_rows(
    predictions: dict[tuple[str, str], Any], part: Collected, settings: Settings, span: Span
) -> list[Stated]:
    import numpy as np

    from solaris_udf.uplift import FM, Figure, figures

    every = dict(predictions)
    notes: list[Figure] = []
    soft = part.rows.soft.astype(np.float64)
    if span.folder is None:
        missing = f"model {span.model_version} is not below models/foundation"
        notes.append(Figure(*FM, -1, "log_loss", None, note=missing))
    elif np.isnan(soft).any():
        notes.append(Figure(*FM, -1, "log_loss", None, note=f"the model refused {int(np.isnan(soft).sum())} rows"))
    else:
        every[FM] = soft[None]
    if np.isfinite(part.truth).all():
        every["truth", ""] = part.truth[None]
    found = figures(part.rows.label, part.user, every, list(range(settings.seeds)), settings.replicates)
    return [("main", "", figure) for figure in [*found, *notes]]


def _sweep_rows(
    by_share: dict[float, Any], predictions: dict[tuple[str, str], Any], part: Collected, settings: Settings
) -> list[Stated]:
    """The coverage sweep; with all rows it is the main evaluation's model."""
    from solaris_udf.uplift import BASE, figures

    rows = []
    shares = dict(by_share)
    if 1.0 in settings.coverage_sweep and ("vm", "embeddings") in predictions:
        shares[1.0] = predictions["vm", "embeddings"]
    for share, found in sorted(shares.items()):
        both = {BASE: predictions[BASE], ("vm", "embeddings"): found}
        stated = figures(part.rows.label, part.user, both, list(range(settings.seeds)), settings.replicates)
        rows += [
            ("coverage", f"{share:g}", figure)
            for figure in stated
            if figure.feature_set == "embeddings" and figure.metric != "transfer_ratio"
        ]
    return rows


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
