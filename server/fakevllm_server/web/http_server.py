"""HTTP server of the swarm server's process. The module handles the server's socket, its limit on
open files, and its shutdown."""

from __future__ import annotations

import logging

from fakevllm_adapters.http.http_url import http_url
from fakevllm_adapters.http.log_format import LogFormat, redact_logs, set_up_logging
from fakevllm_runtime.http_server import (
    GracefulServer,
    listening_socket,
    public_server_config,
    stop_when_stdin_closes,
)
from fakevllm_runtime.open_files import raise_file_limit
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState

BROKEN_JOURNAL_EXIT_CODE = 1
"""Exit code of a server that ended itself because its journal is broken. The code is not 0, so that
a supervisor restarts the server."""


def serve(
    config: ServerConfig,
    *,
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """Run the server until SIGINT or SIGTERM.

    With `until_stdin_closes`, the server also stops when its standard input closes. The standard
    input closes, for example, when the parent process dies. If the parent process already listens
    on a socket, `listen_fd` is the socket's file descriptor. If `listen_fd` is None, the server
    binds the configured host and port. Raises ConfigError if the address or the run directory
    cannot be used. Raises SystemExit if the journal can no longer be written.
    """
    if until_stdin_closes:
        stop_when_stdin_closes()
    set_up_logging(log_format)
    files = raise_file_limit()
    listener = listening_socket(config.host, config.port, listen_fd)
    with listener:
        app = create_app(config)
        running: ServerState = app.state.server
        redact_logs(lambda: running.redactor)
        server = GracefulServer(public_server_config(app, files.num_connections))
        logging.getLogger("fakevllm.server").info(
            "listening on %s, rollout %s, trainer %s",
            http_url(*listener.getsockname()[:2]),
            config.rollout_name,
            config.trainer_name,
        )
        server.run(sockets=[listener])
    state: ServerState = app.state.server
    if state.journal.is_broken:
        raise SystemExit(BROKEN_JOURNAL_EXIT_CODE)
