"""The `solaris` command's way in, `python -m jobs` too: says what to install where only the snapshot reader is."""

import sys


def main() -> None:
    """Runs the command. Exit code 2 if the installation has the reader alone."""
    try:
        from jobs.cli import main as run
    except ModuleNotFoundError as error:
        print(
            f"error: the solaris command needs {error.name}, and this installation holds the snapshot reader alone; "
            "install the rest, in the checkout: pip install '.[pipeline]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
