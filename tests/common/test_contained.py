"""scripts/contained.py: whichever process is killed, and how, nothing of the command is left."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.processes import MARK, marked, until

PROJECT = Path(__file__).parents[2]
CONTAINED = str(PROJECT / "scripts" / "contained.py")
# A child in a session of its own, an orphan of one, and one that may not want to go.
COMMAND = "setsid sleep 600 & (setsid sleep 600 &) ; (true; sleep 600; true) & touch started; wait"
STUBBORN = COMMAND.replace("true; sleep 600", "trap '' TERM; sleep 600; sleep 600")


@pytest.fixture
def run(tmp_path):
    mark = uuid.uuid4().hex

    def start(*command):
        environ = {**os.environ, MARK: mark}
        process = subprocess.Popen(command, cwd=tmp_path, env=environ)
        until(lambda: (tmp_path / "started").exists() and len(marked(mark)) >= 6, "it has not started")
        return process

    yield start, lambda: marked(mark)
    for process in marked(mark):
        process.kill()


@pytest.mark.parametrize(
    ("number", "command"), [(signal.SIGINT, COMMAND), (signal.SIGTERM, STUBBORN), (signal.SIGKILL, COMMAND)]
)
def test_killing_the_process_ends_all_that_the_command_started(run, number, command):
    start, living = run
    process = start(sys.executable, CONTAINED, "bash", "-c", command)
    process.send_signal(number)
    process.wait()
    until(lambda: not living(), "processes are left", 30)


def test_killing_the_guard_ends_all_that_the_command_started(run):
    start, living = run
    process = start(sys.executable, CONTAINED, "bash", "-c", COMMAND)
    (guard,) = [child for child in living() if child.ppid() == process.pid]
    guard.kill()
    process.wait()
    until(lambda: not living(), "processes are left", 30)


def test_killing_its_parent_by_force_ends_it_too(run):
    start, living = run
    process = start("bash", "-c", f'{sys.executable} {CONTAINED} bash -c "{COMMAND}"; true')
    process.kill()
    process.wait()
    until(lambda: not living(), "processes are left", 30)


def test_the_exit_code_is_the_commands(tmp_path):
    assert subprocess.run([sys.executable, CONTAINED, "sh", "-c", "exit 7"], check=False).returncode == 7
    assert subprocess.run([sys.executable, CONTAINED], check=False, capture_output=True).returncode == 2
