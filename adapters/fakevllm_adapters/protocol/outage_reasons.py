"""Machine-readable reasons why a model call gets no answer, and the header that carries the reason.

The sentence in an error's body is for people and may be reworded at any time. Programs decide by
the reason alone.
"""

from __future__ import annotations

from enum import StrEnum

REASON_HEADER = "X-Fakevllm-Reason"
"""Response header in which the swarm server sends an `OutageReason`. A proxy reads the header and
never passes it on to an app."""


class OutageReason(StrEnum):
    """Reason why a model call gets no answer now. The ledger stores the value.

    A swarm server and its engine send the reasons that begin with `engine_`. A proxy sets the two
    reasons that begin with `server_` itself, because its connection to the server has failed.
    """

    SERVER_UNREACHABLE = "server_unreachable"
    """No server accepted the connection, so the request was not started."""
    SERVER_BROKE_OFF = "server_broke_off"
    """The connection broke while the server was working on the request."""
    ENGINE_NOT_READY = "engine_not_ready"
    """The server refused the request because its engine is starting or stopped."""
    ENGINE_FAILED = "engine_failed"
    """The engine was running and failed while it had this request, or it is going away."""
    ENGINE_BUSY = "engine_busy"
    """The engine is running and has no capacity for this request."""


def reason_from_header(value: str | None) -> OutageReason | None:
    """Return the reason in a response's header; None if the header is absent or has an unknown
    reason, such as a reason of a newer version.

    >>> reason_from_header("engine_busy"), reason_from_header("engine_on_fire")
    (<OutageReason.ENGINE_BUSY: 'engine_busy'>, None)
    """
    return OutageReason(value) if value in _VALUES else None


_VALUES = frozenset(OutageReason)
