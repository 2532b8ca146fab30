"""Run `fakevllm console`: listen, show the link for the login, and serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from functools import partial
from typing import NoReturn

from fakevllm.console.access.first_link import keep_first_link, proxy_is_starting
from fakevllm.console.access.link_output import LinkOutput
from fakevllm.console.change_events import ChangeEvents
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.settings import ConsoleSettings
from fakevllm.console.sources.proxy_status import ProxyStatus
from fakevllm.console.sources.server_releases import ServerReleases
from fakevllm.console.sources.server_status import ServerStatus
from fakevllm.console.web_app import create_app
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm_adapters.http.http_url import http_url
from fakevllm_adapters.http.log_format import LogFormat, set_up_logging
from fakevllm_runtime.http_server import (
    GracefulServer,
    listening_socket,
    public_server_config,
    stop_when_stdin_closes,
)
from fakevllm_runtime.open_files import raise_file_limit

log = logging.getLogger("fakevllm")


def run_console(
    settings: ConsoleSettings,
    *,
    log_format: LogFormat = "human",
    until_stdin_closes: bool = False,
    listen_fd: int | None = None,
) -> None:
    """Run the console until a signal stops it. If `until_stdin_closes` is True, it also stops when
    its standard input closes. `listen_fd` is the file descriptor of a listening socket that the
    parent process has opened. Raises UserError for mistakes that the user can fix."""
    if until_stdin_closes:
        stop_when_stdin_closes()
    set_up_logging(log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request at the level INFO
    keys = settings.login_keys()
    num_connections = raise_file_limit().num_connections
    listener = listening_socket(settings.host, settings.port, listen_fd)
    parts = ConsoleParts(
        settings,
        ReadOnlyLedger(settings.ledger),
        ProxyStatus(settings.proxy_url, settings.proxy_key),
        ServerReleases(settings.server_url, settings.server_key),
        ServerStatus(settings.server_url, settings.server_key),
        keys,
        port=listener.getsockname()[1],
        show_link=LinkOutput(sys.stdout).write,
    )
    asyncio.run(_serve(parts, listener, num_connections))


async def _serve(parts: ConsoleParts, listener: socket.socket, num_connections: int) -> NoReturn:
    """Serve until a signal, and then end the process."""
    events = ChangeEvents(parts.ledger.state_of_files)
    server = GracefulServer(
        public_server_config(create_app(parts, events), num_connections), on_stop=events.stop
    )
    log.info(
        "listening on %s, ledger %s, proxy %s",
        http_url(*listener.getsockname()[:2]),
        parts.ledger.file,
        parts.settings.proxy_url,
    )
    parts.show_new_link()
    is_starting = partial(proxy_is_starting, parts.settings.proxy_url)
    keeping = asyncio.create_task(keep_first_link(parts.link, is_starting, parts.clock))
    await server.serve(sockets=[listener])
    keeping.cancel()
    log.info("stopped")
    # Threads that still compute a page would hold the process, and `fakevllm up` stops the console
    # before all others. A console has nothing to save.
    logging.shutdown()
    os._exit(0)
