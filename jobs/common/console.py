"""What the `solaris` command prints: progress, and tables in the terminal."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime

from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.failures import outside_fault
from jobs.common.runs import Outcome, finished_runs
from jobs.common.series import Entry, Step, plan, remaining, run_series
from jobs.common.tables import Tables
from schemas import TABLES

TIERS = ("pair", "user_mean", "neighbor_pair", "neighbor_mean", "cold", "none")


def run_with_progress(
    spark: SparkSession,
    config: Config,
    moments: Sequence[datetime],
    series: Sequence[Entry],
    console: Console,
    force: bool = False,
) -> list[Outcome]:
    """Runs the series with one progress bar; a line for each finished job where the output is not a terminal."""
    finished, same_config = finished_runs(spark, config)
    steps = plan(moments, finished, series)
    todo = remaining(steps, set() if force else same_config)
    outcomes = []
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=len(steps))

        def describe(running: Sequence[Step]) -> None:
            names = " + ".join(step.job for step in running)
            progress.update(bar, description=f"{running[0].as_of:%m-%d %H:%M} {names}" if running else "done")

        progress.update(bar, completed=len(steps) - len(todo))
        for outcome in run_series(spark, config, todo, describe):
            progress.update(bar, advance=1)
            outcomes.append(outcome)
            if not console.is_terminal:
                report = outcome.report
                console.print(
                    f"{outcome.slice} {outcome.job}: {report.rows_in:,} in, {report.rows_out:,} out, "
                    f"{report.rows_rejected:,} rejected, {outcome.seconds:.1f} s",
                    highlight=False,
                )
    skipped = len(steps) - len(todo)
    if skipped:
        console.print(
            f"{skipped} of {len(steps)} steps had succeeded before with this config: left out (--force runs them)"
        )
    return outcomes


def summary(spark: SparkSession, config: Config, outcomes: Iterable[Outcome], console: Console) -> None:
    """The closing tables: what each job did, and the coverage it led to."""
    table = Table("job", title="jobs", title_justify="left")
    for name in ("runs", "rows in", "rows out", "rejected", "seconds"):
        table.add_column(name, justify="right")
    by_job: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_job[outcome.job].append(outcome)
    for job, runs in by_job.items():
        reports = [outcome.report for outcome in runs]
        table.add_row(
            job,
            str(len(runs)),
            f"{sum(r.rows_in for r in reports):,}",
            f"{sum(r.rows_out for r in reports):,}",
            f"{sum(r.rows_rejected for r in reports):,}",
            f"{sum(outcome.seconds for outcome in runs):.1f}",
        )
    if by_job:
        table.add_section()
        table.add_row(
            "all",
            str(sum(map(len, by_job.values()))),
            "",
            "",
            "",
            f"{sum(outcome.seconds for runs in by_job.values() for outcome in runs):.1f}",
        )
        console.print(table)
    show_coverage(spark, config, 8, console)


def show_coverage(spark: SparkSession, config: Config, last: int, console: Console) -> None:
    """Share of scored rows by tier for the last audited windows, summed over snapshots and surfaces."""
    rows = (
        Tables(spark, config.path("tables"))
        .read("coverage_audit")
        .where("surface = 'all' AND segment = 'all' AND population = 'scored'")
        .groupBy("window_start", "window_end", "tier")
        .agg(F.sum("rows").alias("rows"))
        .withColumn("window", F.date_format("window_start", "yyyy-MM-dd HH:mm"))
        .collect()
    )
    by_window: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        by_window[row.window][row.tier] = row["rows"]
    if not by_window:
        console.print("no coverage has been audited yet; audit_coverage needs a window after a snapshot")
        return
    shown_tiers = [tier for tier in TIERS if any(tier in counts for counts in by_window.values())]
    table = Table("window (UTC)", title="coverage of scored rows by tier", title_justify="left")
    for name in (*shown_tiers, "rows", "coverage"):
        table.add_column(name, justify="right")
    for window in sorted(by_window)[-last:]:
        counts = by_window[window]
        total = sum(counts.values())
        table.add_row(
            window,
            *(f"{counts.get(tier, 0) / total:.1%}" for tier in shown_tiers),
            f"{total:,}",
            f"{1 - counts.get('none', 0) / total:.1%}",
        )
    console.print(table)


def show_tables(spark: SparkSession, config: Config, console: Console) -> None:
    """Every table with its slices and rows."""
    tables = Tables(spark, config.path("tables"))
    shown = Table("table", "one row is", title=tables.root, title_justify="left")
    for name in ("slices", "first", "last", "rows"):
        shown.add_column(name, justify="right")
    for name, table in TABLES.items():
        if not tables.exists(name):
            shown.add_row(name, table.comment.split(".")[0], "-", "", "", "not written yet")
            continue
        found = (
            tables.read(name)
            .agg(
                F.count_distinct("slice").alias("slices"),
                F.min("slice").alias("first"),
                F.max("slice").alias("last"),
                F.count("*").alias("rows"),
            )
            .first()
        )
        assert found is not None
        shown.add_row(
            name,
            table.comment.split(".")[0],
            str(found.slices),
            found.first or "",
            found.last or "",
            f"{found['rows']:,}",
        )
    console.print(shown)


def _only_reads(spark: SparkSession, query: str) -> bool:
    """Whether a query changes nothing: it can stand as a subquery, or shows and describes. Runs nothing of it.

    Raises ParseException for what is no SQL at all.
    """
    if re.match(r"(?i)(show|desc|describe|explain)\b", query):
        return True
    try:
        spark.sql(f"EXPLAIN SELECT * FROM ({query}\n)")
    except ParseException:
        spark.sql(f"EXPLAIN {query}")
        return False
    return True


def show_query(spark: SparkSession, config: Config, query: str, rows: int, console: Console) -> None:
    """The first rows of a query. Raises UserError for a query that Spark does not accept, or that would change data."""
    Tables(spark, config.path("tables")).register_views()
    query = query.strip().rstrip(";")
    try:
        if not _only_reads(spark, query):
            raise UserError(
                "query: only SELECT, WITH, VALUES, TABLE, FROM, SHOW, DESCRIBE and EXPLAIN; tables stay as they are"
            )
        frame = spark.sql(query)
        found = frame.limit(rows + 1).collect()
    except (PySparkException, Py4JJavaError) as error:
        if outside_fault(error):
            raise
        lines = [line.removeprefix(": ") for line in str(error).splitlines() if re.search(r"\[[A-Z_.0-9]+\] ", line)]
        raise UserError(f"query: {(lines or str(error).splitlines())[0]}") from None
    table = Table(*frame.columns)
    for row in found[:rows]:
        table.add_row(*("" if value is None else str(value) for value in row))
    console.print(table)
    if len(found) > rows:
        console.print(f"the first {rows} rows; --rows shows more")
