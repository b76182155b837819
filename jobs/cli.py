"""The `solaris` command."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.table import Table

from jobs.common.clock import parse_as_of, steps
from jobs.common.config import Config
from jobs.common.errors import UserError
from jobs.common.failures import explain, writable
from jobs.common.main import resolve
from jobs.common.snapshot_commands import app as snapshot_app
from jobs.common.terminal import ConfigFiles, Overrides, console

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Commands(typer.core.TyperGroup):
    """Ends a command that raised with one clear line and the right exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            if hasattr(error, "exit_code"):  # the command-line library's own: wrong usage, exit, abort
                raise
            raise typer.Exit(explain(error)) from None


app = typer.Typer(
    name="solaris",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(snapshot_app, name="snapshot")
model_app = typer.Typer(no_args_is_help=True, help="Foundation-model folders.")
app.add_typer(model_app, name="model")


def show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"solaris {version('solaris-pipeline')}", highlight=False)
        raise typer.Exit


@app.callback()
def solaris(
    show: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Precompute foundation-model embeddings for the pairs a ranker will score soon, and serve them by lookup."""


@contextmanager
def session(config: Config, name: str) -> Iterator["SparkSession"]:
    """A Spark session that is stopped at the end."""
    from jobs.common.session import build_session

    with console.status("starting Spark"):
        spark = build_session(config, f"solaris {name}")
    try:
        yield spark
    finally:
        spark.stop()


@app.command()
def demo(
    data: Annotated[str, typer.Option(help="world (a simulated ad platform) or movielens-100k")] = "world",
    overrides: Overrides = None,
) -> None:
    """Run the whole pipeline on a demo dataset, end to end, and write a report."""
    from jobs.common.demo import run_demo

    run_demo(data, overrides or [], console)


@app.command()
def run(
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="as_of of the first slice, with a zone")],
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="as_of of the last slice (default: the first)")
    ] = None,
    job: Annotated[list[str] | None, typer.Option("--job", help="Only this job; repeatable")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run also what already succeeded with this config")] = False,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Run the slices from --from to --to in order, in one session; resumes where it stopped."""
    from jobs.common.console import run_with_progress, summary
    from jobs.common.runs import job_module
    from jobs.common.series import SERIES, in_turn

    first = parse_as_of(start, "--from")
    last = first if end is None else parse_as_of(end, "--to")
    config = resolve(files, overrides)
    moments = steps(first, last, config.window.hours)
    for name in job or []:
        job_module(name)
    series = in_turn(job) if job else SERIES
    writable(*config.roots)
    with session(config, "run") as spark:
        outcomes = run_with_progress(spark, config, moments, series, console, force=force)
        summary(spark, config, outcomes, console)


@app.command(context_settings={"ignore_unknown_options": True})  # ids may be negative
def lookup(
    user: Annotated[str | None, typer.Argument(help="User id")] = None,
    items: Annotated[list[str] | None, typer.Argument(help="Item ids")] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time of the request, with a zone, or now (default: when the snapshot went live)"
        ),
    ] = None,
    examples: Annotated[bool, typer.Option("--examples", help="Show one pair of each tier instead")] = False,
    hashed: Annotated[
        bool, typer.Option("--hashed", help="The ids are the tables' integers, also where the dataset's are text")
    ] = False,
    values: Annotated[int, typer.Option(min=0, help="Vector components to print")] = 2,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Ask the live snapshot: tier, age, similarity and vector of a user's items. Needs no Spark."""
    from jobs.common.lookup_view import show_examples, show_lookup

    config = resolve(files, overrides)
    if not examples and (user is None or not items):
        raise UserError("name a user and at least one item: solaris lookup USER ITEM..., or ask for --examples")
    if examples:
        show_examples(config, at, values, console)
    else:
        show_lookup(config, user or "", items or [], at, values, console, hashed=hashed)


@app.command(context_settings={"ignore_unknown_options": True})  # ids may be negative
def neighbors(
    user: Annotated[int, typer.Argument(help="User id")],
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Show a user's most similar users: cosine and the items they have in common."""
    from jobs.common.neighbor_view import show_neighbors

    config = resolve(files, overrides)
    with session(config, "neighbors") as spark:
        show_neighbors(spark, config, user, console)


@app.command()
def coverage(
    last: Annotated[int, typer.Option(min=1, help="Windows to show")] = 8,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Show the audited coverage by window and tier."""
    from jobs.common.console import show_coverage

    config = resolve(files, overrides)
    with session(config, "coverage") as spark:
        show_coverage(spark, config, last, console)


@app.command()
def budget(
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="as_of of a past slice (default: the latest with its window over)"),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Page to write (default: reports/budget-SLICE.html below the storage root)")
    ] = None,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Plot coverage against budget for a past slice, next to simple rules and hindsight."""
    from jobs.common.budget_curve import budget_curves
    from jobs.common.budget_view import latest_past_slice, show_budget, write_budget
    from jobs.common.clock import as_of_of, slice_of
    from jobs.predict_pairs import Settings

    config = resolve(files, overrides)
    moment = None if at is None else parse_as_of(at, "--at")
    with session(config, "budget") as spark:
        as_of = moment or as_of_of(latest_past_slice(spark, config))
        settings = config.get(Settings)
        found = budget_curves(spark, config, settings, as_of, flops=settings.budget_unit == "flops")
    show_budget(found, console)
    page = write_budget(found, config, to or Path(config.path("reports", f"budget-{slice_of(as_of)}.html")))
    console.print(f"page: {page}")


@app.command()
def tables(files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """List the tables with their slices and rows."""
    from jobs.common.console import show_tables

    config = resolve(files, overrides)
    with session(config, "tables") as spark:
        show_tables(spark, config, console)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="Spark SQL; every table of the pipeline is a view of its name")],
    rows: Annotated[int, typer.Option(min=1, help="Rows to show")] = 50,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Query the tables in Spark SQL."""
    from jobs.common.console import show_query

    config = resolve(files, overrides)
    with session(config, "sql") as spark:
        show_query(spark, config, query, rows, console)


@app.command()
def report(
    to: Annotated[
        Path | None, typer.Option(help="File to write (default: reports/index.html below the storage root)")
    ] = None,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Write the HTML report: coverage, budget, uplift, freshness, runs."""
    from jobs.common.report import write_report

    config = resolve(files, overrides)
    with session(config, "report") as spark:
        path = write_report(spark, config, to or Path(config.path("reports", "index.html")))
    console.print(f"report: {path}")


@app.command("config")
def show_config(files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Print the resolved configuration."""
    table = Table("setting", "value", "what it is", box=None)
    for name, section in sorted(resolve(files, overrides).sections.items()):
        for key, info in type(section).model_fields.items():
            table.add_row(f"{name}.{key}", repr(getattr(section, key)), info.description or "")
    console.print(table)


@model_app.command("check")
def model_check(path: Annotated[Path, typer.Argument(help="Model folder")]) -> None:
    """Check a model folder: hashes, shapes, dtypes, a trial batch, finite outputs, independence of batch mates."""
    from solaris_udf.foundation.check import examine_model

    findings = [finding for finding in examine_model(path) if finding.level != "ok"]
    for finding in findings:
        console.print(f"- {finding}", highlight=False, markup=False)
    if any(finding.level == "error" for finding in findings):
        raise UserError(f"{path} does not keep the model contract, see docs/bring-your-own-model.md")
    console.print(f"{path} keeps the model contract", highlight=False)


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 the user's mistake, 1 anything else."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    app()


if __name__ == "__main__":
    main()
