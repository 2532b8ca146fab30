"""Start a swarm server on this machine, for scripts that need one."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from fakevllm.sdk.http_driver import bare_url
from fakevllm.sdk.types import ServerUnreachable

log = logging.getLogger("fakevllm.sdk")

LOOPBACK = ("localhost", "127.0.0.1", "::1")
START_LIMIT_S = 60.0
POLL_INTERVAL_S = 0.1
LOG_FILE = Path("fakevllm-server.log")
LOG_LINES = 5
"""Number of lines of the server's log that are quoted if the server does not start."""


def start_server(url: str) -> None:
    """Start a server at `url`, unless a server answers there already.

    The server goes on running after the script has ended, and the next run of the script uses this
    server again. Raises ValueError if `url` names another machine, and ServerUnreachable if the
    started server does not answer.
    """
    url = bare_url(url)
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK or parts.port is None:
        raise ValueError(
            "auto_start_swarm_server starts a server on this machine: pass a URL such as "
            f"http://localhost:10086, not {url}."
        )
    if _answers(url):
        return
    command = [sys.executable, "-m", "fakevllm_server", "start", "--port", str(parts.port)]
    log.info(
        "starting a swarm server, which continues after this script ends; its log is %s", LOG_FILE
    )
    with LOG_FILE.open("ab") as log_file:
        server = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_LIMIT_S
    while not _answers(url):
        if server.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(LOG_FILE.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise ServerUnreachable(f"The swarm server did not come up. {LOG_FILE} ends:\n{tail}")
        time.sleep(POLL_INTERVAL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=1.0):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
