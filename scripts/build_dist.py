"""`make dist`: what spark-submit sends to a cluster, in dist/.

solaris.zip is for --py-files: the packages and the dataset mappings, the same bytes from the same sources. With
--environment also environment.tar.gz for --archives: Python packages for nodes that have Python but none of them.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
DIST = PROJECT / "dist"
CONTENT = ("jobs", "schemas", "solaris_udf", "conf/datasets")


def build_zip(target: Path) -> Path:
    """Writes the zip of the packages. Returns its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [path for folder in CONTENT for path in sorted((PROJECT / folder).rglob("*")) if path.is_file()]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for path in files:
            if "__pycache__" not in path.parts:
                # A fixed time: the archive of unchanged sources does not change.
                out.writestr(zipfile.ZipInfo(str(path.relative_to(PROJECT)), (2026, 1, 1, 0, 0, 0)), path.read_bytes())
    return target


def build_environment(target: Path) -> Path:
    """Writes a virtual environment with the locked dependencies. Returns its path.

    It holds no interpreter: the nodes need the same Python version under the same path as here.
    """
    folder = PROJECT / "build" / "environment"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    subprocess.run(
        [sys.executable, "-m", *install, "--constraint", str(PROJECT / "constraints.txt"), f"{PROJECT}[pipeline]"],
        check=True,
    )
    with tarfile.open(target, "w:gz") as out:
        out.add(folder, arcname=".")
    shutil.rmtree(folder)
    return target


def main() -> None:
    made = [build_zip(DIST / "solaris.zip")]
    if "--environment" in sys.argv[1:]:
        made.append(build_environment(DIST / "environment.tar.gz"))
    for path in made:
        print(f"{path.relative_to(PROJECT)}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
