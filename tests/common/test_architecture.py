"""Who may import whom, and what importing may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import JOBS

PROJECT = Path(__file__).parents[2]
OURS = ("dags", "jobs", "solaris_udf", "schemas")
ALLOWED = {
    "dags": (),
    "jobs": ("jobs", "jobs.common", "solaris_udf", "schemas"),
    "jobs.common": ("jobs", "jobs.common", "solaris_udf", "schemas"),
    "solaris_udf": ("solaris_udf", "schemas"),
    "schemas": ("schemas",),
}
READER_MAY_IMPORT = {"numpy", "pyarrow", "numba", "llvmlite", "solaris_udf"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def home(module):
    if module == "jobs" or module.startswith("jobs.common"):
        return "jobs.common" if module != "jobs" else "jobs"
    return module.split(".")[0] if not module.startswith("jobs.") else module


def sources(package):
    return sorted((PROJECT / package).rglob("*.py"))


@pytest.mark.parametrize("package", OURS)
def test_packages_import_only_what_they_may(package):
    for path in sources(package):
        place = "jobs.common" if "common" in path.parts and package == "jobs" else package
        for module in imports(path):
            if module.split(".")[0] in OURS and not (
                path.name in ("cli.py", "__main__.py") and module.startswith("jobs.")
            ):
                assert home(module) in ALLOWED[place], f"{path.relative_to(PROJECT)} imports {module}"


def test_no_file_shadows_a_module_that_spark_submit_would_find_first():
    for path in (PROJECT / "jobs").glob("*.py"):
        assert path.stem in (*JOBS, "__init__", "__main__", "cli"), f"{path} is neither a job nor the command"
        assert path.stem not in sys.stdlib_module_names, path


def test_every_job_has_a_file():
    for job in JOBS:
        assert (PROJECT / "jobs" / f"{job}.py").exists()


def test_the_snapshot_reader_needs_numpy_and_pyarrow_alone():
    for path in [*sources("solaris_udf/snapshot"), PROJECT / "solaris_udf/tiers.py", PROJECT / "solaris_udf/codec.py"]:
        for module in imports(path):
            top = module.split(".")[0]
            if path.name == "redis_export.py" and top == "redis":
                continue  # a tool for those who have it, that no reader imports
            assert top in READER_MAY_IMPORT or top in sys.stdlib_module_names, f"{path} imports {module}"


HEAVY = ("torch", "faiss", "sklearn", "matplotlib", "numba", "pandas")


def loaded_after(code):
    script = (
        f"{code}\nimport sys; print(*[name for name in {HEAVY!r} + ('pyspark', 'pydantic') if name in sys.modules])"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PROJECT
    ).stdout.split()


def test_loading_a_config_imports_every_job_and_nothing_heavy():
    assert not set(loaded_after("from jobs.common.config import load_config; load_config(environ={})")) & set(HEAVY) - {
        "pandas"
    }


def test_importing_the_reader_imports_nothing_of_the_pipeline():
    assert loaded_after("import solaris_udf.snapshot") == []


@pytest.mark.parametrize("job", JOBS)
def test_help_answers_without_spark(job):
    done = subprocess.run(
        [sys.executable, "-m", f"jobs.{job}", "--help"], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert "--as-of" in done.stdout
    assert "settings:" in done.stdout


def test_where_only_the_reader_is_installed_the_command_says_what_to_install():
    script = "import sys; sys.modules['typer'] = None; from jobs.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 2
    assert "needs typer" in done.stderr and "pip install '.[pipeline]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
