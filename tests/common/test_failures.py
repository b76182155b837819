"""What a user sees when something goes wrong: one line, the exit code, nothing written."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from delta.exceptions import MetadataChangedException
from typer.testing import CliRunner

from jobs.cli import app
from jobs.common.errors import RunFailed, UserError
from jobs.common.failures import explain, outside_fault, writable
from jobs.common.lookup_view import as_ids
from jobs.common.session import DELTA_EXTENSION, PROJECT, build_session, java


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask("lookup", ...) -> (exit code, what stands on standard error), for a root where nothing is yet."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        found = CliRunner().invoke(app, [*arguments, "--set", f"storage.root={tmp_path / 'root'}"])
        return found.exit_code, found.stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lookup"], "name a user and at least one item"),
        (["lookup", "42"], "name a user and at least one item"),
        (["lookup", "abc", "1"], "user 'abc' is no 64-bit integer"),
        (["lookup", "1", "1.5"], "item '1.5' is no 64-bit integer"),
        (["lookup", "1", str(2**63)], "is no 64-bit integer"),
        (["lookup", "-1", "--exmaples"], "item '--exmaples' is no 64-bit integer"),
        (["lookup", "1", "2", "--at", "2026-01-01"], "--at '2026-01-01' has no time zone"),
        (["lookup", "--examples", "--at", "noon"], "--at 'noon' is not a time"),
        (["lookup", "1", str(-(2**63))], "snapshots; give a snapshots folder"),
        (["lookup", "1", "2", "--set", "log.dataset=wordl"], "no dataset 'wordl'; did you mean world?"),
        (["lookup", "1", "2", "--set", "serving.ttl_hour=1"], "did you mean ttl_hours?"),
        (["lookup", "1", "2", "--config", "none.toml"], "config file none.toml does not exist"),
        (["run", "--from", "2026-01-01T00:00:00"], "--from '2026-01-01T00:00:00' has no time zone"),
        (["run", "--from", "2026-01-01T00:00:00Z", "--to", "soon"], "--to 'soon' is not a time"),
        (["run", "--from", "2026-01-01T00:00:00Z", "--job", "ingest"], "there is no job 'ingest'"),
        (["run", "--from", "2026-01-01T00:00:00Z", "--to", "2925-01-01T00:00:00Z"], "is --to right?"),
        (["demo", "--data", "movielens"], "there is no demo on 'movielens'"),
        (["budget", "--at", "2026-01-01"], "--at '2026-01-01' has no time zone"),
        (["snapshot", "verify"], "there is no folder"),
        (["snapshot", "verify", "no-such-id"], "there is no folder"),
        (["snapshot", "inspect"], "there is no folder"),
        (["snapshot", "rollback"], "there is no folder"),
        (["snapshot", "pin", "x"], "there is no folder"),
        (["snapshot", "unpin", "x"], "there is no folder"),
        (["snapshot", "gc", "--keep", "0"], "keep is 0, must be at least 1"),
        (["model", "check", "nowhere"], None),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_exit_code_2(ask, tmp_path, arguments, says):
    if arguments[0] == "model":
        found = CliRunner().invoke(app, arguments)
        assert (found.exit_code, len(found.stderr.splitlines())) == (2, 1)
        return
    code, error = ask(*arguments)
    assert (code, len(error.splitlines())) == (2, 1)
    assert error.startswith("error: ")
    assert says in error
    assert not (tmp_path / "root").exists()


def test_the_version_is_that_of_setup_py():
    found = CliRunner().invoke(app, ["--version"])
    (declared,) = re.findall(r'^    version="(.+)",$', (PROJECT / "setup.py").read_text(), re.MULTILINE)
    assert (found.exit_code, found.stdout) == (0, f"solaris {declared}\n")


@pytest.mark.parametrize(
    "arguments",
    [["coverage", "--last", "0"], ["sql", "--rows", "-1", "SELECT 1"], ["lookup", "1", "2", "--values", "-2"]],
)
def test_counts_below_their_least_are_refused(ask, arguments):
    code, error = ask(*arguments)
    assert code == 2
    assert "greater than or equal to" in error


def test_ids_of_text_are_hashed_and_those_of_the_tables_are_not(make_config, tmp_path):
    mapping = tmp_path / "shop.toml"
    mapping.write_text(
        'replay = true\nids = {user = "string"}\ntime = {unit = "s"}\n[log]\nformat = "csv"\n'
        '[log.columns]\nuser_id = "u"\nitem_id = "i"\nevent_time = "t"\nclicked = "c"\n'
    )
    config = make_config(f"log.dataset={mapping}")
    # Spark: SELECT xxhash64('abc')
    assert as_ids(config, "user", ["abc"], hashed=False) == [1423657621850124518]
    assert as_ids(config, "user", ["-7"], hashed=True) == [-7]
    assert as_ids(config, "item", ["-7", "+8"], hashed=False) == [-7, 8]
    with pytest.raises(UserError, match="item 'abc' is no 64-bit integer"):
        as_ids(config, "item", ["abc"], hashed=False)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("say this"), 2, "error: say this"),
        (RunFailed("too many"), 1, "failed: too many"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on where it stopped"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/report.html"),
            2,
            "error: /x/report.html: Permission denied; choose another place, or give this user the right to it",
        ),
        (
            MetadataChangedException("The metadata of the Delta table has been changed"),
            1,
            "failed: another run wrote the same slice of a table meanwhile; the same command goes on where it stopped",
        ),
    ],
)
def test_an_error_that_we_know_is_one_line(capsys, error, code, line):
    assert explain(error) == code
    assert capsys.readouterr().err == line + "\n"


def test_an_error_that_we_do_not_know_brings_its_traceback(capsys):
    assert explain(KeyError("x")) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "failed: KeyError: 'x'"
    assert rest


def test_a_damaged_file_is_named():
    text = (
        "An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: "
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:/r/tables/items/a-c000.snappy.parquet.  "
        "SQLSTATE: KD001\n\tat x"
    )
    assert (outside_fault(Exception(text)) or "").startswith("/r/tables/items/a-c000.snappy.parquet is damaged or gone")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables").chmod(0o555)
    with pytest.raises(UserError, match="tables can't be written by this user"):
        writable(str(tmp_path))


def test_a_root_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(UserError, match=r"storage\.root .* can't be made"):
            writable(str(root))


def test_no_java_is_said_before_spark_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UserError, match="no java on PATH, and JAVA_HOME is not set; install a JDK 17"):
        java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UserError, match=f"no java at JAVA_HOME = {tmp_path}"):
        java()


def test_a_job_alone_answers_as_the_command_does(tmp_path):
    for arguments, says in (
        (["--as-of", "2026-01-03"], "error: --as-of '2026-01-03' has no time zone"),
        (["--as-of", "2026-01-03T00:00:00Z", "--set", "storage.root=/dev/null/x"], "error: storage.root /dev/null/x"),
    ):
        command = [sys.executable, "-m", "jobs.ingest_log", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(says)
        assert len(done.stderr.splitlines()) == 1


def test_a_jar_that_is_not_there_is_one_line(tmp_path):
    """Spark itself only warns of it, and would fail much later, in words about a data source."""
    file = tmp_path / "spark.conf"
    file.write_text(
        "spark.master local[1]\nspark.driver.host 127.0.0.1\nspark.ui.enabled false\n"
        f"spark.jars {tmp_path / 'gone.jar'}\nspark.sql.extensions {DELTA_EXTENSION}\n"
    )
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--properties-file", str(file)]
    job = [str(PROJECT / "jobs" / "ingest_log.py"), "--as-of", "2026-01-03T00:00:00Z"]
    done = subprocess.run(
        [*submit, *job, "--set", f"storage.root={tmp_path / 'root'}"],
        cwd=tmp_path,
        # Spark's scripts look for a Python of their own on the PATH, which need not be the one with pyspark.
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert "error: the Spark session has no Delta Lake; submit with --properties-file" in done.stdout
    assert not (tmp_path / "root" / "tables").exists()


def test_without_the_jars_of_s3_nothing_starts(tmp_path, make_config):
    config = make_config(f"spark.jars_dir={tmp_path}", "storage.root=s3a://ads/x", f"storage.files={tmp_path}")
    with pytest.raises(UserError, match=r"there are no jars for s3a:// in .*; run make s3"):
        build_session(config, "test")
