"""The status of the swarm server: its engines with their load, the batch for the next training
step, and the clients that claim episodes.

All browser pages share one cached status. The methods block the calling thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fakevllm.console.sources.engine_loads import EngineLoad, parse_engine_loads
from fakevllm.console.sources.shared_reply import SharedReply
from fakevllm.overwatch.history import History
from fakevllm.overwatch.poller import NO_SWARM_SERVER, none_if_not_found
from fakevllm.overwatch.snapshot import Snapshot, build_snapshot
from fakevllm.sdk.engine_control import POOL_PATH
from fakevllm.sdk.http_driver import HttpDriver, bare_url
from fakevllm.sdk.protocol import ServerCall, ServerRequest, fetch, send
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.swarm import EngineStatusReply

TIMEOUT_S = 5.0
"""Timeout in seconds of the requests that the server answers from memory. A browser waits for the
page meanwhile."""
METRICS_TIMEOUT_S = 2.0
"""Timeout in seconds of the request for the load, which the engine answers."""
UNAUTHORIZED = 401
_FOREIGN_JSON = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of code that expects the replies of a swarm server and gets other JSON."""

log = logging.getLogger("fakevllm.console.server_status")


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the console shows of the server."""

    url: str
    status: EngineStatusReply | None = None
    """None if the server did not send its status."""
    snapshot: Snapshot | None = None
    """The status together with the batch and the clients, as `fakevllm overwatch` shows them. None
    if the server did not send its status."""
    loads: Sequence[EngineLoad] = ()
    """The load of each engine. Empty if no engine runs, or if the load is not known."""
    problem: str = ""
    """Why the server did not send its status, and what to do about it."""

    @property
    def redacts(self) -> bool:
        """Whether the server or its job is known to redact texts."""
        privacy = {} if self.status is None else self.status.privacy
        return bool(privacy.get("redact") or privacy.get("patterns"))


class ServerStatus:
    """The status of one server, which all pages share."""

    def __init__(
        self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._key = key
        self._reply = SharedReply(self._fetch, clock)

    def view(self) -> ServerView:
        """Return the status. Problems with the server are part of the status, and raise no
        error."""
        view = self._reply.get(TIMEOUT_S)
        return view or self._not_reached("has not answered yet")

    def _fetch(self) -> ServerView:
        http = HttpDriver(self._url, self._key)
        try:
            return http.run(self._read())
        except ServerUnreachable as error:  # translates: the page shows the sentence
            problem = f"{error.detail}: start it with `fakevllm-server start`, or set --swarm."
            return ServerView(bare_url(self._url), problem=problem)
        except SwarmError as error:  # translates
            if error.status == UNAUTHORIZED:
                return self._not_reached("needs an API key: pass it with --swarm-key")
            return self._not_reached(f"refused: {error.detail}")
        except _FOREIGN_JSON:  # translates
            return ServerView(bare_url(self._url), problem=f"{NO_SWARM_SERVER} Set --swarm.")
        finally:
            http.close()

    def _not_reached(self, reason: str) -> ServerView:
        url = bare_url(self._url)
        return ServerView(url, problem=f"The server at {url} {reason.rstrip('.')}.")

    def _read(self) -> ServerCall[ServerView]:
        request = ServerRequest("/get_engine_status", timeout_s=TIMEOUT_S)
        status = yield from fetch(request, EngineStatusReply)
        request = ServerRequest(POOL_PATH, timeout_s=TIMEOUT_S)
        pool = yield from none_if_not_found(fetch(request, PoolInformation))
        loads = yield from _read_loads()
        url = bare_url(self._url)
        snapshot = build_snapshot(url, time.time(), status, pool, History())
        return ServerView(url, status, snapshot, loads)


def _read_loads() -> ServerCall[Sequence[EngineLoad]]:
    """Return the load of each engine. Return an empty list if the engine does not answer in time,
    or if it has no metrics of this kind."""
    try:
        reply = yield from send(ServerRequest("/metrics", timeout_s=METRICS_TIMEOUT_S))
    except ServerUnreachable as error:  # isolates: the server has sent its status
        log.debug("the load of the engines is not known: %s", error)
        return []
    if reply.status != 200 or not isinstance(reply.content, str):
        return []
    try:
        return parse_engine_loads(reply.content)
    except Exception as error:  # isolates: malformed metrics must not hide the status
        log.debug("the metrics of the engines cannot be parsed: %s", error)
        return []
