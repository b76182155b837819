"""The example in C++ must answer as the reader does: the format's page is all that it was written from."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from solaris_udf.snapshot import Snapshot
from solaris_udf.snapshot.layout import FORMAT_MAJOR, FORMAT_MINOR
from solaris_udf.tiers import PAIR
from tests.udf.snapshot_fakes import HIGH, HOUR, LOW, publish_snapshot

SOURCE = Path(__file__).parents[2] / "examples" / "lookup.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build examples/lookup.cpp with")
    folder, library = tmp_path_factory.mktemp("cpp"), Path(pa.get_library_dirs()[0])
    # pyarrow's library has its version in its name and no plain one to link with.
    shared = next(library.glob("libarrow.so*"))
    command = [compiler, "-std=c++20", SOURCE, "-o", folder / "lookup", f"-I{pa.get_include()}", shared]
    subprocess.run([*command, f"-Wl,-rpath,{library}"], check=True, timeout=300)
    return folder / "lookup"


def ask(program, *words):
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_cpp_reads_what_the_reader_reads(program, tmp_path, codec):
    ids = [LOW, -1, 0, 1, 2**53 + 1, HIGH]
    draw = np.random.default_rng(3)
    pairs = {(user, item): (draw.normal(size=3).tolist(), HOUR) for user in ids for item in ids if user != item}
    folder = tmp_path / publish_snapshot(tmp_path, pairs, shards=3, dim=3, codec=codec)
    snapshot = Snapshot.open(tmp_path, engine="numpy")
    keys = [*list(pairs)[::5], (0, 0), (7, 1)]
    for user, item in keys:
        for at in (HOUR - 1, HOUR, 25 * HOUR - 1, 25 * HOUR):  # the TTL is 24 h
            found, out = snapshot.lookup([user], [item], at), ask(program, folder, user, item, at)
            assert out.returncode == 0, out.stderr
            words = out.stdout.split()
            if found.tier[0] != PAIR:
                assert words == ["none"]
            else:
                assert int(words[0]) == found.age_seconds[0]
                np.testing.assert_allclose([float(word) for word in words[1:]], found.embedding[0], rtol=1e-5)


def test_cpp_says_what_is_wrong_in_one_line(program, tmp_path):
    for words in [(), (tmp_path / "nothing", 1, 2, 3)]:
        out = ask(program, *words)
        assert out.returncode == 2
        assert out.stderr.startswith("lookup: ")
        assert out.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "known"), [("1.0", True), ("1.9", True), ("2.0", False), ("10.1", False), ("0.9", False)]
)
def test_cpp_refuses_another_major_version(program, tmp_path, version, known):
    folder = tmp_path / publish_snapshot(tmp_path, {(1, 2): ((0.5, -3.0), 0)})
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    assert text.count('"format_version": "1.0"') == 1
    manifest.write_text(text.replace('"format_version": "1.0"', f'"format_version": "{version}"'))
    out = ask(program, folder, 1, 2, 0)
    if known:
        assert (out.returncode, out.stdout) == (0, "0 0.5 -3\n")
    else:
        told = f"lookup: manifest.json has format version {version}; this reader knows 1.x\n"
        assert (out.returncode, out.stdout, out.stderr) == (2, "", told)


def test_the_format_page_is_of_the_version_that_is_written():
    page = (SOURCE.parents[1] / "docs" / "snapshot-format.md").read_text().splitlines()
    assert page[0] == f"# The snapshot format, version {FORMAT_MAJOR}.{FORMAT_MINOR}"
