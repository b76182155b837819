"""What the DAGs cost: the time to parse each file, and a slice by Airflow over the same slice by `solaris run`.

Parse times are medians of fresh processes: without Airflow's own import (the modules of Airflow that dags/ imports are
there already, as in a DAG processor, which forks) and with it. Without --quick also one slice of the tiny world, on
copies of the same tables: `solaris run`, one session with jobs side by side, and `airflow dags test solaris_refresh`, a
spark-submit a task and one after the other.
"""

import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measure import Figure, arguments, at_most, report

sys.path.append(str(Path(__file__).resolve().parents[1]))
from jobs.common.series import SERIES
from jobs.common.terminal import console

PROJECT = Path(__file__).resolve().parents[1]
FILES = [PROJECT / "dags" / f"solaris_{name}.py" for name in ("refresh", "daily", "evaluate")]
WORLD_END, FIRST, SECOND = "2026-01-05T00:00:00Z", "2026-01-03T12:00:00Z", "2026-01-03T18:00:00Z"
SLICE_JOBS = [entry.job for entry in SERIES if entry.cadence == "slice"]
TARGET_SECONDS = 1.0
# argv: a DAG file, then what is imported before the clock of "parse" starts.
PARSE = """
import importlib, json, runpy, sys, time
started = time.perf_counter()
for name in sys.argv[2:]:
    importlib.import_module(name)
imported = time.perf_counter()
runpy.run_path(sys.argv[1])
ended = time.perf_counter()
print("RESULT" + json.dumps({"parse": ended - imported, "all": ended - started}))
"""


def airflow_imports() -> list[str]:
    """The modules of Airflow that the files of dags/ import."""
    found = set()
    for file in sorted((PROJECT / "dags").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("airflow"):
                found.add(str(node.module))
    return sorted(found)


def environ_of(home: Path) -> dict[str, str]:
    """An Airflow of its own below home, without what this shell says of Airflow and SOLARIS."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "SOLARIS"))}
    return {**kept, "AIRFLOW_HOME": str(home), "PYTHONPATH": str(PROJECT / "dags")}


def parse_times(home: Path, repeats: int) -> list[Figure]:
    """Two figures a file; the first processes, which compile modules and write Airflow's config, do not count."""
    modules, environ = airflow_imports(), environ_of(home)
    seconds: dict[Path, list[dict[str, float]]] = {file: [] for file in FILES}
    for turn in range(1 + repeats):
        for file in FILES:
            command = [sys.executable, "-c", PARSE, str(file), *modules]
            done = subprocess.run(command, env=environ, cwd=home, check=True, capture_output=True, text=True)
            if turn:
                seconds[file].append(json.loads(done.stdout.rsplit("RESULT", 1)[1]))
    figures = []
    for file, found in seconds.items():
        alone, whole = (statistics.median(each[kind] for each in found) for kind in ("parse", "all"))
        figures.append(at_most(f"parse {file.name}, Airflow imported before", alone, "s", TARGET_SECONDS))
        figures.append(Figure(f"parse {file.name}, Airflow's own import included", whole, "s"))
    return figures


def call(command: list[str], environ: Mapping[str, str]) -> float:
    """Seconds of a command. Raises SystemExit with its last lines if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environ, cwd=PROJECT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return time.perf_counter() - started


def overhead(folder: Path) -> list[Figure]:
    """A slice by `solaris run` and by `airflow dags test`, once each."""
    os.environ.update(environ_of(folder / "home"))
    from scripts.local_airflow import settings  # reads AIRFLOW_HOME when it is imported

    environ = {
        **os.environ,
        **settings(),
        "SOLARIS_DEADLINES": "off",
        "SOLARIS__STORAGE__ROOT": str(folder / "base"),
        "PYTHONPATH": str(PROJECT),
    }
    config = ["--config", "conf/airflow.toml"]
    console.print("the world, its first slice and Airflow's database", style="dim")
    call([sys.executable, "-m", "jobs.make_world", "--as-of", WORLD_END, *config], environ)
    call([sys.executable, "-m", "jobs", "run", "--from", FIRST, *config], environ)
    call([sys.executable, "scripts/local_airflow.py", "database"], environ)
    jobs = [f"--job={job}" for job in SLICE_JOBS]
    conf = json.dumps({"as_of": SECOND})
    commands = {
        "solaris run": [sys.executable, "-m", "jobs", "run", "--from", SECOND, *config, *jobs],
        "airflow dags test": [sys.executable, "-m", "airflow", "dags", "test", "solaris_refresh", "--conf", conf],
    }
    seconds = {}
    for name, command in commands.items():
        console.print(f"a slice by {name}", style="dim")
        root = folder / name.replace(" ", "-")
        shutil.copytree(folder / "base", root)
        seconds[name] = call(command, {**environ, "SOLARIS__STORAGE__ROOT": str(root)})
    figures = [Figure(f"slice by {name}", value, "s") for name, value in seconds.items()]
    more = seconds["airflow dags test"] - seconds["solaris run"]
    return [*figures, Figure("overhead of the DAG, a task", more / len(SLICE_JOBS), "s")]


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        home.mkdir()
        figures = parse_times(home, 3 if options.quick else 7)
        if not options.quick:
            figures += overhead(Path(name))
    report("the DAGs", figures, options.json)


if __name__ == "__main__":
    main()
