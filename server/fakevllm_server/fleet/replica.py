"""One replica of a fleet: its rollout, its HTTP client, its state and its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from fakevllm_server.fleet.engine_figures import (
    PrefixCacheHits,
    parse_num_waiting,
    parse_prefix_cache,
)
from fakevllm_server.fleet.health_watch import CHECK_INTERVAL_S, Health, HealthWatch
from fakevllm_server.fleet.router import ReplicaState, ReplicaView
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.types.backend import Endpoint, Rollout

CHECKS_PER_METRICS = 2
"""Number of health checks after which the replica's metrics are read again."""


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What users see of one replica."""

    name: str
    state: ReplicaState
    version: int
    """Version of the weights that the replica serves."""
    num_running: int
    num_waiting: int | None
    """Number of samples in the engine's queue, when its metrics were read. None if the engine does
    not report it."""
    num_restarts: int
    prefix_cache: PrefixCacheHits | None
    """None if the engine does not report its prefix cache."""
    cause: str | None
    """Why the replica was taken out last; None if it never was."""


class Replica:
    """A rollout engine as one of several. The fleet decides about the phases. The health checks
    decide whether the replica is suspect."""

    def __init__(
        self,
        name: str,
        rollout: Rollout,
        *,
        uses_allowed: bool = False,
        on_passed_check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the replica. `uses_allowed` says whether the trainer can use the sets of allowed
        tokens that the engine reports. `on_passed_check` is called after each health check that
        succeeds."""
        self.name = name
        self._on_passed_check = on_passed_check
        self._uses_allowed = uses_allowed
        self.rollout = rollout
        self.phase = ReplicaState.STARTING
        self.is_suspect = False
        self.policies: frozenset[str] = frozenset()
        self.client: EngineClient | None = None
        """HTTP client of the running engine; None if no engine runs."""
        self.num_restarts = 0
        self.cause: str | None = None
        self._prefix_cache: PrefixCacheHits | None = None
        self._num_waiting: int | None = None
        self._condemned: asyncio.Future[str] | None = None
        self.num_checks = 0
        """Number of health checks that have begun."""
        self.passed_check = 0
        """Number of the latest health check that has succeeded; 0 before the first one."""

    @property
    def is_out(self) -> bool:
        """Whether the replica gets no calls, because it is being started."""
        return self.phase is ReplicaState.STARTING

    @property
    def state(self) -> ReplicaState:
        if self.is_suspect and not self.is_out:
            return ReplicaState.SUSPECT
        return self.phase

    @property
    def endpoint(self) -> Endpoint:
        assert self.client is not None, "the replica has been launched"
        return self.client.endpoint

    @property
    def view(self) -> ReplicaView:
        running = 0 if self.client is None else self.client.endpoint.gate.num_running
        return ReplicaView(self.state, running, self.policies)

    @property
    def figures(self) -> ReplicaFigures:
        gate = None if self.client is None else self.client.endpoint.gate
        return ReplicaFigures(
            self.name,
            self.state,
            0 if gate is None else gate.version,
            0 if gate is None else gate.num_running,
            None if self.is_out else self._num_waiting,
            self.num_restarts,
            self._prefix_cache,
            self.cause,
        )

    async def launch(self) -> None:
        """Start the engine, or connect to it, and create its HTTP client. The phase stays STARTING.
        Raises BackendError if the engine does not start."""
        endpoint = await self.rollout.launch()
        reports = endpoint.reports_allowed and self._uses_allowed
        client = EngineClient(replace(endpoint, reports_allowed=reports, replica=self.name))
        try:
            await client.fetch_version()
        except BaseException:  # the fleet may be closed meanwhile
            await client.close()
            raise
        self.client = client
        self.is_suspect, self.policies, self._num_waiting = False, frozenset(), None
        self._condemned = asyncio.get_running_loop().create_future()

    def condemn(self, cause: str) -> None:
        """Take the replica out at once: it gets no further calls. `wait_until_ended` then ends, so
        that the fleet starts the replica again."""
        self.phase, self.cause = ReplicaState.STARTING, cause
        if self._condemned is not None and not self._condemned.done():
            self._condemned.set_result(cause)

    def suspect(self) -> None:
        """Send no new calls to the replica until its next health check."""
        self.is_suspect = True

    async def close(self) -> None:
        """End the engine, or disconnect from it. Calls that the engine is answering fail at once,
        and calls that wait at its gate look for another replica."""
        self.phase = ReplicaState.STARTING
        client, self.client = self.client, None
        if client is not None:
            client.endpoint.gate.abandon()
            await client.close()
        await self.rollout.close()

    async def wait_until_ended(self) -> str:
        """Wait until the engine has died or hangs, or until the replica is condemned. Return the
        cause."""
        assert self._condemned is not None, "launch first"
        watchers = {
            asyncio.ensure_future(self.rollout.lost()),
            asyncio.ensure_future(self._wait_until_hung()),
            asyncio.ensure_future(_result_of(self._condemned)),
        }
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _wait_until_hung(self) -> str:
        watch = HealthWatch()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.num_checks += 1
            number = self.num_checks
            health = watch.observe(is_healthy=await self._check(number))
            self.is_suspect = health is not Health.GOOD
            if health is Health.HUNG:
                return "it does not answer health checks, and was ended"
            if health is Health.GOOD:
                self.passed_check = number
                self._on_passed_check()

    async def _check(self, number: int) -> bool:
        """Check the replica's health. If it is time to read its metrics, read them meanwhile, so
        that a frozen replica costs only one timeout."""
        if number % CHECKS_PER_METRICS:
            return await self.rollout.health()
        is_healthy, _ = await asyncio.gather(self.rollout.health(), self._read_metrics())
        return is_healthy

    async def _read_metrics(self) -> None:
        page = None if self.client is None else await self.client.fetch_metrics()
        if page is not None:
            self._prefix_cache = parse_prefix_cache(page)
            self._num_waiting = parse_num_waiting(page)


async def _result_of(future: asyncio.Future[str]) -> str:
    return await asyncio.shield(future)
