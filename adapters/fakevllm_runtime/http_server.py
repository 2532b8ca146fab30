"""The HTTP server of a process, with its listening socket and its graceful stop.

After a stop by a signal, uvicorn's own server raises the signal again. This signal would end the
process before the program has written its files and finished its running work. `GracefulServer`
returns to its caller instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fakevllm_adapters.http.asgi import AsgiApp
from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.http_protocol import ArrivalLimits, limited_protocol
from fakevllm_runtime.log_throttle import ThrottledLog

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

BACKLOG = 2_048
"""Maximum number of connections that wait in the kernel until the process accepts them."""
KEEP_ALIVE_S = 65
"""Seconds for which an idle connection is kept open. Clients keep idle connections for a shorter
time, so the client closes the connection and not the server. If the server closed it, a request
that a client sends at the same moment would be lost."""
WARNING_INTERVAL_S = 60.0
"""Minimum number of seconds between two equal warnings of uvicorn."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulServer(uvicorn.Server):
    """A uvicorn server that stops on Ctrl-C or SIGTERM and then returns to its caller."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None] = lambda: None) -> None:
        """Create the server. `on_stop` is called when the stop begins, while requests are open."""
        super().__init__(config)
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.config.uds is not None:
            os.chmod(self.config.uds, 0o600)  # uvicorn gives every user access

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def public_server_config(app: AsgiApp, num_connections: int) -> uvicorn.Config:
    """Return uvicorn's settings for a port that untrusted clients may reach.

    `num_connections` is the maximum number of open connections. Uvicorn's warnings in the log are
    rate-limited, because any client can cause warnings. For example, a client can send bytes that
    are not HTTP.
    """
    warnings = logging.getLogger("uvicorn.error")
    if not any(isinstance(one, ThrottledLog) for one in warnings.filters):
        warnings.addFilter(ThrottledLog(WARNING_INTERVAL_S))
    return uvicorn.Config(
        cast("ASGI3Application", app),  # uvicorn types scopes and messages one by one
        http=limited_protocol(AutoHTTPProtocol, ArrivalLimits(num_connections=num_connections)),
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        ws="none",
    )


def listening_socket(
    host: str, port: int, fd: int | None = None, *, setting: str = "--port"
) -> socket.socket:
    """Return a socket that listens on `host` and `port`.

    If `fd` is not None, return the socket with this file descriptor instead. The parent process has
    opened this socket, and the socket already listens. Raises ConfigError if the address cannot be
    used. The message contains `setting`, the name of the flag or key that sets the port.
    """
    if fd is not None:
        return socket.socket(fileno=fd)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be used ({error.strerror}): choose another {setting}."
        ) from None
    listener.listen(BACKLOG)
    return listener


def stop_when_stdin_closes() -> None:
    """Start a thread that sends SIGTERM to this process when its standard input ends.

    Use this function if standard input is a pipe from the parent process. If the parent process
    dies for any reason, the pipe closes, and this process stops.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
