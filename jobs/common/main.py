"""What `spark-submit jobs/NAME.py` and `python -m jobs.NAME` do: parse, run one job at one as_of, exit with a code."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.common.clock import parse_as_of, slice_of
from jobs.common.config import Config, load_config
from jobs.common.failures import explain, writable
from jobs.common.runs import execute, job_module
from jobs.common.session import PROJECT, build_session


def default_config_files() -> list[Path]:
    """conf/local.toml of the project, if there is one: what runs when no --config is given."""
    local = PROJECT / "conf" / "local.toml"
    return [local] if local.exists() else []


def resolve(files: Sequence[str] | None, overrides: Sequence[str] | None) -> Config:
    """The config of a command line: its --config files, or the default ones, and its --set overrides."""
    return load_config(files or default_config_files(), overrides or [])


def main(job: str, argv: Sequence[str] | None = None) -> None:
    """Entry point of a job file. `--help` answers without starting Spark."""
    module = job_module(job)
    lines = [
        f"  {job}.{name} = {info.default!r}" + (f"  {info.description}" if info.description else "")
        for name, info in module.Settings.model_fields.items()
    ]
    parser = argparse.ArgumentParser(
        prog=f"jobs/{job}.py",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings:\n" + ("\n".join(lines) or "  none"),
    )
    parser.add_argument("--as-of", required=True, metavar="TIME", help="logical time with a zone: 2026-01-03T06:00:00Z")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file; repeat to layer (default: conf/local.toml)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override one setting; repeatable",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the call and the config, then stop")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    try:
        as_of = parse_as_of(arguments.as_of, "--as-of")
        config = resolve(arguments.config, arguments.overrides)
        if arguments.dry_run:
            where = config.path().rstrip("/")
            print(f"dry run: {job} {slice_of(as_of)} below {where}, config {config.hash}; nothing was read or written")
            return
        writable(*config.roots)
        spark = build_session(config, f"solaris {job} {arguments.as_of}")
        try:
            execute(job, spark, config, as_of)
        finally:
            spark.stop()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(explain(error))
