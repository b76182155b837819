"""What every benchmark here shares: its command line, interleaved timing, the table and the JSON file."""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from jobs.common.terminal import console


@dataclass(frozen=True)
class Figure:
    """One measured value, None where it can't be stated; met is None where there is no target."""

    metric: str
    value: float | None
    unit: str
    target: float | None = None
    met: bool | None = None


def at_least(metric: str, value: float, unit: str, target: float) -> Figure:
    """A figure that should reach its target."""
    return Figure(metric, value, unit, target, bool(value >= target))


def at_most(metric: str, value: float, unit: str, target: float) -> Figure:
    """A figure that should stay below its target."""
    return Figure(metric, value, unit, target, bool(value <= target))


def arguments(description: str | None, **more: Mapping[str, object]) -> argparse.Namespace:
    """--quick, --json FILE and what the benchmark adds: name = arguments of add_argument."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under 3 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    for name, options in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)  # type: ignore[arg-type]
    return parser.parse_args()


def interleaved(tasks: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of each task, run in turn so that a slow minute of the machine hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warm_up + repeats):
        for name, task in tasks.items():
            gc.collect()
            start = time.perf_counter()
            task()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(title: str, figures: list[Figure], file: Path | None) -> None:
    """Prints the figures and writes them to the file, if there is one."""
    table = Table("figure", title=title, title_justify="left")
    for name in ("value", "unit", "target", "met"):
        table.add_column(name, justify="right")
    for each in figures:
        value = "-" if each.value is None else f"{each.value:,.4g}"
        met = "" if each.met is None else "yes" if each.met else "no"
        table.add_row(each.metric, value, each.unit, "" if each.target is None else str(each.target), met)
    console.print(table)
    if file:
        file.write_text(json.dumps([asdict(each) for each in figures], indent=2) + "\n", encoding="utf-8")
