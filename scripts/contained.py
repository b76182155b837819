"""Runs a command such that nothing it started outlives this process: python scripts/contained.py COMMAND...

Airflow's scheduler, workers and API server go on when their parent dies. So the command runs below a guard process that
adopts what its children leave behind (a child subreaper) and notices by a pipe when this process is gone, however that
came about. Whichever of the two dies first, the other ends the rest.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ASK_SECONDS = 8.0  # for tasks to end their Spark applications


class Stop(Exception):
    """Somebody asked this process to end."""


def _control(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux: children are found by their parents alone
        ctypes.CDLL("libc.so.6").prctl(option, value)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Stop


def end_descendants() -> None:
    """Asks every process below this one to end, then ends it by force, until there is none."""
    deadline = time.monotonic() + ASK_SECONDS
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while left := _living():
        if time.monotonic() > deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.1)


def _living() -> list[psutil.Process]:
    with suppress(ChildProcessError):  # what was adopted must be waited for, or it stays as a zombie
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return psutil.Process().children(recursive=True)


def guard(command: list[str], alive: int) -> int:
    """Runs the command until it ends or the other end of the pipe `alive` is closed. Returns its exit code."""
    os.setsid()  # Ctrl-C in a terminal goes to the parent, which tells the guard
    _control(PR_SET_CHILD_SUBREAPER, 1)
    code = 128 + signal.SIGTERM
    try:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not select.select([alive], [], [], 0.2)[0]:
            if running.poll() is not None:
                code = running.returncode
                break
    except Stop:
        pass
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_descendants()
    return code


def main(command: list[str]) -> int:
    if not command:
        print("usage: contained.py COMMAND...", file=sys.stderr)
        return 2
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    _control(PR_SET_CHILD_SUBREAPER, 1)
    _control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be watched
        return 1
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os._exit(guard(command, theirs))
    os.close(theirs)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except Stop:
        os.close(ours)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_descendants()  # none, unless the guard was killed by force
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
