"""A uvicorn server that stops on Ctrl-C or SIGTERM and then returns to its caller.

Uvicorn's own server raises the signal again after it has stopped. That would end the process before
the caller has written the ledger and settled the running groups.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator

import uvicorn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
