"""dist/solaris.zip: whole, and the same for the same sources."""

import subprocess
import sys

from scripts.build_dist import build_zip


def test_every_job_runs_from_the_zip_alone(tmp_path):
    archive = build_zip(tmp_path / "solaris.zip")
    script = (
        "import sys, importlib\n"
        f"sys.path.insert(0, {str(archive)!r})\n"
        "from jobs import JOBS\n"
        "from jobs.common.config import load_config\n"
        "load_config(environ={})\n"  # imports every job
        "from jobs.common.datasets import load_dataset\n"
        "assert load_dataset('world').replay\n"
        "ours = [m for n, m in sys.modules.items() if n.split('.')[0] in ('jobs', 'schemas', 'solaris_udf')]\n"
        "outside = [m.__name__ for m in ours if 'solaris.zip' not in (m.__file__ or 'solaris.zip')]\n"
        "assert len(ours) > len(JOBS) and not outside, outside\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_unchanged_sources_give_the_same_bytes(tmp_path):
    first, second = (build_zip(tmp_path / name / "solaris.zip") for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
