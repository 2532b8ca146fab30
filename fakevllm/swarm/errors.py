"""Decide whether a failed request to the swarm server (which samples and trains) may be retried.
Describe the failure and its fix to the user."""

from __future__ import annotations

import aiohttp

from fakevllm.runtime.error_cause import error_cause, one_line

CALL_TIMEOUT_S = 10
"""Timeout of a request to the server, in seconds."""
NEEDS_ADMIN_KEY = (
    "the proxy's key may not start the engine: have an admin start it, or give an admin's key with "
    "--swarm-key and restart the proxy"
)
VERSIONS_NEED_ADMIN_KEY = (
    "The proxy's key may not load versions: give an admin's key with --swarm-key and restart the "
    "proxy, or leave --version out."
)
RELEASES_NEED_ADMIN_KEY = (
    "the proxy's key may not decide about releases: give an admin's key with --swarm-key and "
    "restart the proxy"
)
RELEASES_NEED_NEWER_SERVER = "the server does not know releases: update fakevllm-server"
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


def is_transient(error: BaseException) -> bool:
    """Return True if `error` is a network error that may be temporary. The request may then succeed
    when it is sent again. The result is False for a refusal (4xx), because the server would refuse
    the request again.

    >>> is_transient(TimeoutError()), is_transient(ValueError())
    (True, False)
    """
    is_refusal = isinstance(error, aiohttp.ClientResponseError) and 400 <= error.status < 500
    return isinstance(error, NETWORK_ERRORS) and not is_refusal


def describe_error(error: Exception, timeout_s: float = CALL_TIMEOUT_S) -> str:
    """Return one line that names the problem with the server and says how to fix the problem. The
    line has no subject, because the caller writes the server's URL in front of the line.
    `timeout_s` is the timeout of the failed request.

    >>> describe_error(TimeoutError())
    'does not answer within 10 s: see its log'
    >>> describe_error(TimeoutError(), timeout_s=600.0)
    'does not answer within 600 s: see its log'
    """
    match error:
        case aiohttp.ClientResponseError(status=401):
            return "refuses the proxy's key (401): give a key of the server with --swarm-key"
        case aiohttp.ClientResponseError():
            answer = one_line(f"{error.status} {error.message}".strip())
            return f"answers {answer}: see its log, or name a fakevllm-server with --swarm"
        case TimeoutError():
            return f"does not answer within {timeout_s:g} s: see its log"
        case aiohttp.ClientError():
            return (
                f"cannot be reached ({error_cause(error)}): start it with `fakevllm-server "
                "start`, or name another with --swarm"
            )
        case _:
            return f"cannot be polled ({type(error).__name__}: {one_line(str(error))})"
