"""What the `solaris` commands share: their console and the options that choose a config."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console


class TextConsole(Console):
    """A console that wraps tables only: a terminal wraps lines itself, and a path cut in two can't be copied."""

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(each, str) for each in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


# Into a pipe or a file there is no width to fit.
# What is printed is data: square brackets in it are no markup.
console = TextConsole(width=None if sys.stdout.isatty() else 130, markup=False)

ConfigFiles = Annotated[
    list[str] | None, typer.Option("--config", help="TOML file; repeat to layer (default: conf/local.toml)")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE; repeatable")]
