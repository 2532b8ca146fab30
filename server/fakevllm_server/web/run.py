"""Runs the server until it is told to stop."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import threading

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fakevllm_adapters.http.head_limit import limit_head
from fakevllm_adapters.http.log_format import LogFormat, set_up_logging
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.web.app import create_app

KEEP_ALIVE_S = 65
"""Longer than clients keep idle connections, so that it is they who close them."""
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
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    set_up_logging(log_format)
    _allow_open_files()
    if listen_fd is not None:
        listener = socket.socket(fileno=listen_fd)
    else:
        listener = _bind(config.host, config.port)
    with listener:
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(config),
                http=limit_head(AutoHTTPProtocol),
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=5,
                ws="none",
            )
        )
        logging.getLogger("fakevllm.server").info(
            "listening on http://%s:%d, rollout %s, trainer %s",
            config.host,
            config.port,
            config.rollout_name,
            config.trainer_name,
        )
        server.run(sockets=[listener])


def _leave_with_parent() -> None:
    """A parent that dies, however it dies, closes the pipe it holds."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _allow_open_files() -> None:
    """As far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be used ({error.strerror}): choose another --port."
        ) from None
    listener.listen(2048)
    return listener
