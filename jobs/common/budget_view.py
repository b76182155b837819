"""What `solaris budget` shows: coverage against budget in the terminal, and as a page."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.budget_curve import Budgets
from jobs.common.clock import as_of_of, slice_of
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.report import write_page
from jobs.common.report_page import Section, table
from jobs.common.tables import Tables
from jobs.common.terminal import console as terminal

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
PLOTTED = [step / 200 for step in range(201)]


def latest_past_slice(spark: SparkSession, config: Config) -> str:
    """The latest slice of predict_pairs whose window has been ingested. Raises UserError if there is none."""
    tables = Tables(spark, config.path("tables"))
    ingested = tables.last_slice("ranking_log")
    end = as_of_of(ingested) - timedelta(hours=config.window.hours) if ingested else None
    found = tables.last_slice("candidate_pairs", until=end) if end else None
    if found is None:
        raise UserError(
            f"no slice of candidate_pairs below {config.path('tables')} has its window in the log yet; run the next "
            f"slice's ingest_log, or name a time with --at"
        )
    return found


def show_budget(found: Budgets, console: Console = terminal) -> None:
    """Covered rows by budget and rule, as shares of the window's scored rows."""
    names = [curve.rule for curve in found.curves]
    title = (
        f"slice {slice_of(found.as_of)}: share of {found.rows:,} scored rows that a budget would have covered; "
        f"{found.candidates:,} candidates"
    )
    shown = Table("budget", title=title, title_justify="left")
    for name in names:
        shown.add_column(name, justify="right")
    for row in _table_rows(found):
        shown.add_row(*row)
    console.print(shown)
    if not found.verifier_used:
        console.print("no verifier was trained by then: its column is decayed frequency, as the run used")
    if found.taken:
        share, rows = found.taken
        console.print(
            f"the run itself chose {fmt.share(share)} of the cost and covered {fmt.share(rows / found.rows)}; "
            f"pairs that it reused are in it",
            highlight=False,
        )


def _table_rows(found: Budgets, shares: Sequence[float] = SHARES, digits: int = 0) -> list[tuple[str, ...]]:
    """One row a budget: what each rule would have covered."""
    return [
        (f"{share:.{digits}%}", *(fmt.share(curve.rows_at(share) / found.rows) for curve in found.curves))
        for share in shares
    ]


def write_budget(found: Budgets, config: Config, target: Path) -> Path:
    """The same as a page with a plot, and every plotted point in a table."""
    section = Section(
        "budget",
        f"Coverage against budget, slice {slice_of(found.as_of)}",
        "The scored rows of the window that a share of what all candidates would cost would have covered, each rule "
        "choosing its best pairs; hindsight knows the window, but may only choose candidates too. The diamond is what "
        "the run itself chose.",
    )
    series = [
        (
            curve.rule,
            color,
            "dotted" if curve.rule in ("random", "hindsight") else "solid",
            PLOTTED,
            [curve.rows_at(share) / found.rows for share in PLOTTED],
        )
        for curve, color in zip(found.curves, charts.SERIES, strict=True)
    ]
    points = [("chosen", "ink", found.taken[0], found.taken[1] / found.rows)] if found.taken else []
    section.charts.append(
        charts.lines(
            "Covered share of scored rows by budget",
            "Coverage rises with the budget; the verifier's curve against simple rules and hindsight.",
            series,
            x="share of what all candidates cost",
            y="covered share of scored rows",
            dated=False,
            percent_x=True,
            percent_y=True,
            points=points,
        )
    )
    columns = ("budget", *(curve.rule for curve in found.curves))
    section.tables.append(table("Covered share of scored rows", columns, _table_rows(found), open=True))
    if found.taken:
        share, rows = found.taken
        chosen = (fmt.share(share), fmt.count(rows), fmt.share(rows / found.rows))
        section.tables.append(
            table("What the run itself chose", ("budget", "covered rows", "covered share"), [chosen], open=True)
        )
    section.tables.append(table("Every point of the plot", columns, _table_rows(found, PLOTTED, digits=1)))
    return write_page([section], [], config, target, slices=1)
