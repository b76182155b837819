"""What the `solaris` commands share: their console and the options that choose a config."""

import sys
from typing import Annotated

import typer
from rich.console import Console

# Into a pipe or a file there is no width to fit.
# What is printed is data: square brackets in it are no markup.
console = Console(width=None if sys.stdout.isatty() else 130, markup=False)

ConfigFiles = Annotated[
    list[str] | None, typer.Option("--config", help="TOML file; repeat to layer (default: conf/local.toml)")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE; repeatable")]
