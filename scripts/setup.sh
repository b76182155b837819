#!/usr/bin/env bash
# Sets the project up in its own folder: .venv (locked dependencies), .jars (Delta Lake for Spark), Spark's defaults.
# Needs Python 3.11+ and Java 17+. Called by make; safe to call again.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "setup: $*" >&2; exit 2; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null 2>&1 ||
    fail "no $python found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $version; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"

java=${JAVA_HOME:+$JAVA_HOME/bin/}java
command -v "$java" >/dev/null 2>&1 || fail "no $java found; install a JDK 17 or newer, or point JAVA_HOME at one"
java_version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
[ "${java_version:-0}" -ge 17 ] || fail "$java is version ${java_version:-unknown}; install a JDK 17 or newer, or point JAVA_HOME at one"

# A folder of wheels that is preferred to the index, for example torch's CPU build: PyPI's brings 3 GB of CUDA.
wheels=${WHEELS:-../shared/wheels}
if [ -d "$wheels" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(cd "$wheels" && pwd)
    export UV_FIND_LINKS
fi

echo "setup: Python $version, Java $java_version"
[ -x .venv/bin/python ] || "$python" -m venv .venv ||
    fail "$python can't make a virtual environment; install its venv module (Debian: apt install python3-venv)"
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    .venv/bin/python -m pip install --quiet "uv>=0.5" || fail "uv could not be installed from the package index; is there a network?"
    uv=.venv/bin/uv
fi
"$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable '.[dev]' ||
    fail "the locked dependencies could not be installed; is there a network?"

if ! ls .jars/*delta-spark*.jar >/dev/null 2>&1; then
    echo "setup: resolving the Delta Lake jars"
    mkdir -p .cache
    .venv/bin/python scripts/fetch_jars.py >.cache/fetch_jars.log 2>&1 ||
        fail "the Delta Lake jars could not be resolved; is there a network? see .cache/fetch_jars.log"
fi
.venv/bin/python scripts/write_spark_defaults.py
touch .venv/.ready
echo "setup: done"
