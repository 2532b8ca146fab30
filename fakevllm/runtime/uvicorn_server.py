"""A uvicorn server that stops on Ctrl-C and SIGTERM and then returns: its caller closes up.

Uvicorn's own raises the signal again when it is done, which ends the process before the ledger is
written and running groups are settled.
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
