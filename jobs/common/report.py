"""The report: one self-contained HTML page about the state of a pipeline, from its Delta tables alone."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import SparkSession

from jobs.common.config import Config
from jobs.common.report_data import read_report_data
from jobs.common.report_page import Section, Tile
from jobs.common.report_sections import sections, tiles
from jobs.common.tables import Tables

TEMPLATE = "report.html.j2"


def write_report(spark: SparkSession, config: Config, path: str | Path, *, slices: int = 200) -> Path:
    """Writes the report of the tables below config's storage.root to path and returns it.

    It covers the last `slices` slices of each table; tables that are empty or missing give sections that say what to
    run. The file appears whole or not at all.
    """
    data = read_report_data(Tables(spark, config.path("tables")), slices)
    return write_page(sections(data), tiles(data), config, Path(path), slices)


def write_page(parts: Sequence[Section], figures: Sequence[Tile], config: Config, target: Path, slices: int) -> Path:
    """Writes a page of these sections to target, whole or not at all, and returns it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(render(parts, figures, config, slices), encoding="utf-8")
    partial.replace(target)
    return target


def render(parts: Sequence[Section], figures: Sequence[Tile], config: Config, slices: int) -> str:
    """The page: it loads nothing from outside, runs no script and escapes all text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(
        sections=parts,
        tiles=figures,
        dataset=config.log.dataset,
        root=config.storage.root,
        config_hash=config.hash,
        window_hours=config.window.hours,
        ttl_hours=config.serving.ttl_hours,
        slices=slices,
        written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
    )
