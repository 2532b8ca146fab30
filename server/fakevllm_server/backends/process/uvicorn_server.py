"""A uvicorn server that stops on Ctrl-C and SIGTERM and then returns: its caller closes up.

Uvicorn's own raises the signal again when it is done, which ends the process before the engine's
thread has come to rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Generator

import uvicorn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.config.uds is not None:
            os.chmod(self.config.uds, 0o600)  # uvicorn lets everybody in

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
