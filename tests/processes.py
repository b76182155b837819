"""Finding what a test's process started: all of it inherits a mark in its environment."""

import time
from collections.abc import Callable

import psutil

MARK = "SOLARIS_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """The living processes with that mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def until(condition: Callable[[], object], complaint: str, seconds: float = 120) -> None:
    """Waits for the condition. Fails with the complaint when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)
