"""Runs the server until it is told to stop."""

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
"""Connections of all the clients that may have claimed, and as many to the engine. A shell's own
limit is often 1,024."""


def serve(
    config: ServerConfig,
    *,
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """`listen_fd`: of the socket that a parent listens on for it. Raises ConfigError where the
    address or the run directory cannot be had."""
    if until_stdin_closes:
        stop_when_stdin_closes()
    set_up_logging(log_format)
    _allow_open_files()
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


def _allow_open_files() -> None:
    """As far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
