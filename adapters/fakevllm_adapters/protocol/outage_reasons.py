"""Machine-readable reasons why a model call gets no answer, and the response header that carries
the reason.

The message in an error's body is for people, and its wording may change at any time. Programs
should read only the reason.
"""

from __future__ import annotations

from enum import StrEnum

REASON_HEADER = "X-Fakevllm-Reason"
"""Response header in which the swarm server (the server that trains) sends an `OutageReason`. A
proxy reads the header and never passes it on to an app."""


class OutageReason(StrEnum):
    """Reason why a model call gets no answer now. The proxy stores the value in its ledger of
    requests.

    The swarm server, which trains the model, and its engine send the reasons that begin with
    `engine_`. The proxy itself sets the reasons that begin with `server_`, if its connection to the
    server failed.
    """

    SERVER_UNREACHABLE = "server_unreachable"
    """No server accepted the connection, so the request was not started."""
    SERVER_BROKE_OFF = "server_broke_off"
    """The connection broke while the server was working on the request."""
    ENGINE_NOT_READY = "engine_not_ready"
    """The server refused the request because its engine is starting or stopped."""
    ENGINE_FAILED = "engine_failed"
    """The running engine failed while it had this request, or the engine is shutting down."""
    ENGINE_BUSY = "engine_busy"
    """The engine is running and has no capacity for this request."""


def reason_from_header(value: str | None) -> OutageReason | None:
    """Return the outage reason that a response header names. Return None if the header is absent,
    or if its reason is unknown. A newer server may send reasons that are unknown here.

    >>> reason_from_header("engine_busy"), reason_from_header("engine_on_fire")
    (<OutageReason.ENGINE_BUSY: 'engine_busy'>, None)
    """
    return OutageReason(value) if value in _VALUES else None


_VALUES = frozenset(OutageReason)
