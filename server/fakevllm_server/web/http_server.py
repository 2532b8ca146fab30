"""HTTP server of the swarm server's process: its socket, its limit of open files, and its stop."""

from __future__ import annotations

import logging
import resource

import uvicorn

from fakevllm_adapters.http.log_format import LogFormat, set_up_logging
from fakevllm_runtime.http_server import (
    listening_socket,
    public_server_config,
    stop_when_stdin_closes,
)
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app

OPEN_FILES = 8_192
"""Limit of open files that the process sets for itself: enough for a connection for each episode
that may be claimed, and as many to the engine. A shell's default limit is often 1,024."""


def serve(
    config: ServerConfig,
    *,
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    With `until_stdin_closes` the server also stops when its standard input closes, which happens if
    its parent process dies. `listen_fd` is the file descriptor of a socket on which the parent
    process listens already; None binds the configured host and port. Raises ConfigError if the
    address or the run directory cannot be used.
    """
    if until_stdin_closes:
        stop_when_stdin_closes()
    set_up_logging(log_format)
    _raise_open_file_limit()
    listener = listening_socket(config.host, config.port, listen_fd)
    with listener:
        server = uvicorn.Server(public_server_config(create_app(config)))
        logging.getLogger("fakevllm.server").info(
            "listening on http://%s:%d, rollout %s, trainer %s",
            config.host,
            config.port,
            config.rollout_name,
            config.trainer_name,
        )
        server.run(sockets=[listener])


def _raise_open_file_limit() -> None:
    """Raise the process's limit of open files to OPEN_FILES, or to the system's hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
