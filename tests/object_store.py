"""An S3 server on loopback (moto's), and what a process needs to reach it."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import until

SECRET = "wJalrXUtnFEMIexample"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server that runs until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens, "the S3 server does not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def credentials(url: str) -> dict[str, str]:
    """The environment of a process that uses the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "AKIAexample",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
