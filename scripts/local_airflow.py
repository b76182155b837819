"""`make airflow`: a local Airflow with the DAGs, a connection, a pool and demo data, on 127.0.0.1 alone.

Its home is .airflow, its data .solaris/airflow, both inside the project. The simulated platform's log reaches from four
days before to three days after today, so that "the last full hour" has rows to work on; it is made again when it runs
out. Run it through scripts/contained.py, as make does: this script ends when it is asked to and cleans nothing up.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

PROJECT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("AIRFLOW_HOME") or PROJECT / ".airflow")
DATA = Path(os.environ.get("SOLARIS__STORAGE__ROOT") or PROJECT / ".solaris" / "airflow")
PORT = int(os.environ.get("PORT", "8080"))
CONFIG = PROJECT / "conf" / "airflow.toml"
HOURS = 6  # window.hours of the config
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=512m -XX:+UseSerialGC"
COMPONENTS = {
    "scheduler": ["scheduler", "--skip-serve-logs"],  # logs are read from the disk
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
    "api-server": ["api-server", "--host", "127.0.0.1", "--port", str(PORT)],
}


def settings() -> dict[str, str]:
    """The environment of every component: all that differs from Airflow's defaults."""
    url = f"http://127.0.0.1:{PORT}"
    return {
        "AIRFLOW_HOME": str(HOME),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "2",  # Spark drivers side by side
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(PORT),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__INSTANCE_NAME": "SOLARIS",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
        "SOLARIS_HOME": str(PROJECT),
        "SOLARIS_CONFIG": "conf/airflow.toml",
        # On demand: a schedule would start a run of its own beside the first one triggered by hand.
        "SOLARIS_REFRESH_CRON": os.environ.get("SOLARIS_REFRESH_CRON", ""),
        "SOLARIS_DAILY_CRON": os.environ.get("SOLARIS_DAILY_CRON", ""),
        "SOLARIS__STORAGE__ROOT": str(DATA),
        # Each task is a new JVM with little data: its time goes into compiling, so a quick compiler is the better one.
        "SPARK_SUBMIT_OPTS": os.environ.get("SPARK_SUBMIT_OPTS", JVM_OPTIONS),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def say(text: str) -> None:
    print(f"airflow: {text}", flush=True)


def fail(text: str) -> None:
    print(f"airflow: {text}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_port() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            fail(f"port {PORT} is taken; name another: make airflow PORT={PORT + 1}")


def demo_data(now: datetime) -> None:
    """A log around today, and one slice before now with its models, so that every DAG has something to work on."""
    ready, last = DATA / ".ready", now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=3)
    if ready.exists() and datetime.fromisoformat(ready.read_text()) > now + timedelta(days=1):
        return
    if ready.exists():
        say(f"the simulated log in {DATA} has run out; it is made again")
        ready.unlink()
    first = now.replace(hour=now.hour // HOURS * HOURS, minute=0, second=0, microsecond=0) - timedelta(hours=HOURS)
    say(f"making demo data in {DATA}; the first time this takes minutes")
    world = ["jobs.make_world", "--as-of", _text(last), "--config", str(CONFIG)]
    finish("demo-data", [sys.executable, "-m", *world])
    finish("demo-data", [sys.executable, "-m", "jobs", "run", "--from", _text(first), "--config", str(CONFIG)])
    ready.write_text(last.isoformat())


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def password() -> str:
    """The admin's password, made on the first call."""
    file = HOME / "simple_auth_manager_passwords.json.generated"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(json.dumps({"admin": secrets.token_urlsafe(9)}))
    return str(json.loads(file.read_text())["admin"])


def database() -> None:
    """Creates or migrates Airflow's database, with connection and pool."""
    from airflow.configuration import write_default_airflow_configuration_if_needed
    from airflow.models import Connection
    from airflow.models.pool import Pool
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session
    from sqlalchemy import select

    write_default_airflow_configuration_if_needed()  # with the keys that the components share
    initdb()
    with create_session() as session:
        if session.scalar(select(Connection).where(Connection.conn_id == "solaris_spark")) is None:
            session.add(Connection(conn_id="solaris_spark", conn_type="spark", host="local[2]"))
        Pool.create_or_update_pool("solaris_gpu", 1, "foundation model", False, session=session)


def logged(name: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Starts a command whose output goes to HOME/NAME.log."""
    with (HOME / f"{name}.log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=PROJECT)


def finish(name: str, command: list[str]) -> None:
    """The same, to its end. Exits with the log's last line if it fails."""
    log = HOME / f"{name}.log"
    if logged(name, command).wait():
        fail(f"{name} failed: {(log.read_text().strip().splitlines() or ['?'])[-1]}; see {log}")


def healthy() -> bool:
    """Whether every component answers and the DAG files have been read."""
    try:
        with urlopen(f"http://127.0.0.1:{PORT}/api/v2/monitor/health", timeout=5) as answer:
            health = json.load(answer)
    except (OSError, ValueError):
        return False
    return all(health[name]["status"] == "healthy" for name in ("metadatabase", "scheduler", "dag_processor"))


def main() -> int:
    check_port()
    HOME.mkdir(parents=True, exist_ok=True)
    os.environ.update(settings())
    demo_data(datetime.now(UTC))
    say("starting")
    finish("database", [sys.executable, __file__, "database"])
    components = [logged(name, [sys.executable, "-m", "airflow", *rest]) for name, rest in COMPONENTS.items()]
    told = False
    while all(component.poll() is None for component in components):
        if not told and healthy():
            say(f"http://127.0.0.1:{PORT}   login: admin   password: {password()}")
            say("unpause and trigger solaris_refresh; Ctrl-C ends everything")
            told = True
        time.sleep(1)
    dead = [name for name, part in zip(COMPONENTS, components, strict=True) if part.poll() is not None]
    fail(f"{', '.join(dead)} ended; see {', '.join(str(HOME / f'{name}.log') for name in dead)}")
    return 1


if __name__ == "__main__":
    sys.exit(database() if sys.argv[1:] == ["database"] else main())
