"""The one console that the `solaris` commands print to."""

import sys

from rich.console import Console

# Into a pipe or a file there is no width to fit.
console = Console(width=None if sys.stdout.isatty() else 130)
