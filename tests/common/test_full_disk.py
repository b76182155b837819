"""A disk that is full: a real file system of a few megabytes, filled up in the middle of a slice."""

import subprocess

import pytest

from jobs.common.failures import explain
from jobs.common.log import histories_at
from jobs.common.runs import execute
from tests.conftest import AS_OF, hours, log_row

pytestmark = pytest.mark.spark


@pytest.fixture
def root(tmp_path):
    """A storage root with 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system of a given size can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_one_clear_line_nothing_half_written_and_the_next_try_succeeds(
    spark, root, fill, tables, make_config, capsys
):
    fill("ranking_log", [log_row(user, 7, AS_OF - hours(1)) for user in range(3)])
    for name in ("user_histories", "job_runs"):  # as after earlier slices
        tables.create(name)
    filler = root / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:  # until nothing fits
        while True:
            file.write(b"0" * 4096)
    with pytest.raises(Exception) as caught:
        execute("update_histories", spark, make_config(), AS_OF)
    assert explain(caught.value) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: the disk of") and str(root) in told and "is full" in told
    assert tables.read("user_histories").isEmpty()

    filler.unlink()
    execute("update_histories", spark, make_config(), AS_OF)
    assert sorted(row.user_id for row in histories_at(tables, AS_OF).collect()) == [0, 1, 2]
