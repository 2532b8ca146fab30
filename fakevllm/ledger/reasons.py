"""Slugs with which the column `reason` of a group begins, if the proxy itself ended the group."""

from __future__ import annotations

from enum import StrEnum


class EndReason(StrEnum):
    """Reasons why a group (a request with its sampled answers) is not trained, apart from the
    admission rules and the failures of hooks. If the engine refuses a request, the reason is
    `upstream_` with the HTTP status, such as `upstream_400`. If the engine broke off every answer,
    the reason is `broken_off`."""

    NO_ANSWER = "no_answer"
    """No sibling has an answer. The column `error` of the siblings has the cause."""
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    """No connection to the server could be made, or the connection broke. There is no fallback."""
    CLIENT_DISCONNECTED = "client_disconnected"
    """The app disconnected before it had its answer."""
    PROXY_STOPPED = "proxy_stopped"
    """The proxy was stopped before the request was answered."""
    SIBLINGS_IN_FLIGHT = "siblings_in_flight"
    """The limit `serve.max_siblings_in_flight` left capacity only for the lead."""
    ENGINE_BUSY = "engine_busy"
    """The queue at the engine left capacity only for the lead."""
    EVALUATION = "evaluation"
    """The group was sampled for an evaluation, which is never trained."""
    NO_GROUP = "no_group"
    """No other sibling has an answer, so there is nothing to compare."""
    FEWER_THAN_TWO_REWARDS = "fewer_than_two_rewards"
    """The hook scored fewer than two siblings, so there is nothing to compare."""
    NO_TRAINABLE_CALL = "no_trainable_call"
    """No call of the answer can be trained."""
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    """The group could not be recorded, so its rewards were not sent to the server."""
    SWARM_UNREACHABLE = "swarm_unreachable"
    """The rewards could not be sent, because the server could not be reached."""
    SWARM_REFUSED = "swarm_refused"
    """The server refused the rewards. The detail is the HTTP status."""
    END_FAILED = "end_failed"
    """The rewards could not be sent, because of an unexpected error. The detail is its type."""
    INTERNAL_ERROR = "internal_error"
    """Code of the proxy failed. The proxy's log has the traceback."""
    SERVER_CRASHED = "server_crashed"
    """The server crashed, and the training of the group was lost."""
