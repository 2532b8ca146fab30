"""Several rollout replicas as one `Rollout`.

The fleet promises four things:

* New weights reach the replicas one after the other. While one replica takes them, the others
  answer.
* A replica that dies, hangs or has wrong weights is taken out at once. It is started again in the
  background, and has the fleet's current weights before it answers again.
* The fleet counts as lost only when no replica is left.
* All replicas serve the same model with the same version of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fakevllm_server.fleet.replica import Replica, ReplicaFigures
from fakevllm_server.fleet.router import NO_AFFINITY, CallAffinity, ReplicaState, Router
from fakevllm_server.fleet.weight_copy import WeightCopy
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    BackendRefused,
    Endpoint,
    Rollout,
)
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.weight_versions import WeightGate

log = logging.getLogger("fakevllm.server")

DRAIN_BOUND_S = 10.0
"""Maximum seconds that new weights wait for the running calls of one replica. Longer calls are
sampled partly with the old and partly with the new weights, as on a single engine."""
SETTLE_S = 0.1
"""Seconds for which a draining replica must have no call before it takes new weights. The siblings
of a group arrive some milliseconds apart, and should be sampled with the same weights."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Seconds between a failed start of a replica and the next one. The pauses double up to the
maximum."""
RECHECK_S = 1.0
"""Seconds after which a call that waits for a replica checks the replicas again."""


class FleetRollout:
    """Drives several rollout replicas, and chooses the replica for each call."""

    def __init__(
        self, rollouts: Mapping[str, Rollout], weights_folder: Path, *, uses_allowed: bool = False
    ) -> None:
        """Create the fleet. `weights_folder` keeps the current weights for replicas that are
        started again. It must be on a file system that the replicas can read. `uses_allowed` says
        whether the trainer can use reported sets of allowed tokens."""
        self._replicas = {
            name: Replica(
                name,
                rollout,
                uses_allowed=uses_allowed,
                on_passed_check=self._wake_waiting,
            )
            for name, rollout in rollouts.items()
        }
        self._changed = asyncio.Event()
        """Set once, when the fleet changes the next time."""
        self._router = Router()
        self._weights = WeightCopy(weights_folder)
        self._keepers: list[asyncio.Task[None]] = []
        self._changing = asyncio.Lock()
        """Lock held while new weights are loaded, and while a restarted replica gets weights."""
        self._all_out = asyncio.Event()
        """Set while no replica is left."""
        self._all_out.set()
        self._model: _ServedModel | None = None

    @property
    def figures(self) -> list[ReplicaFigures]:
        """The replicas as users see them, in the order of their names."""
        return [replica.figures for replica in self._replicas.values()]

    @property
    def held_policies(self) -> frozenset[str]:
        """Names of the policies that at least one running replica holds, as of the latest load,
        unload or call of `policies`."""
        return frozenset[str]().union(*(replica.policies for replica in self._running))

    @property
    def _running(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.is_out]

    # --- calls

    async def client_for(
        self, call: CallAffinity = NO_AFFINITY, failed: EngineClient | None = None
    ) -> EngineClient | None:
        """Return the HTTP client of the replica that is to answer a call. Return None if no replica
        is left.

        `failed` is the client with which an earlier attempt of the call failed. The call goes to
        another replica. If there is no other one, wait until a replica passes a health check.
        """
        suspect = None if failed is None else self._suspect(failed)
        suspect_name, num_checks = None, 0
        if suspect is not None:
            suspect_name, num_checks = suspect.name, suspect.num_checks
        while True:
            views = {name: replica.view for name, replica in self._replicas.items()}
            name = self._router.choose(call, views, suspect_name)
            if name is None:
                return None
            replica = self._replicas[name]
            if replica.client is not failed or replica.passed_check > num_checks:
                assert replica.client is not None, "the router chooses only replicas that run"
                return replica.client
            await self.wait_for_change(RECHECK_S)

    def _suspect(self, failed: EngineClient) -> Replica | None:
        """Send no new calls to the replica with this client until its next health check. Return the
        replica. If the replica has been restarted since, return None."""
        for replica in self._running:
            if replica.client is failed:
                replica.suspect()
                return replica
        return None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a replica begins to serve or passes a health check, or until the fleet is
        closed, but at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _wake_waiting(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def metrics_pages(self) -> dict[str, bytes]:
        """Return the Prometheus metrics of each replica that reports them, by the replica's
        name."""
        running = [(replica.name, replica.client) for replica in self._running]
        clients = [(name, client) for name, client in running if client is not None]
        pages = await asyncio.gather(*(client.fetch_metrics() for _, client in clients))
        named = zip((name for name, _ in clients), pages, strict=True)
        return {name: page for name, page in named if page is not None}

    # --- Rollout

    async def launch(self) -> Endpoint:
        """Start all replicas. Raises BackendRefused if a replica refuses to start, or serves
        another model than the others. Raises BackendError if no replica starts. A replica that does
        not start for another reason is started again in the background."""
        await self.close()
        replicas = list(self._replicas.values())
        outcomes = await asyncio.gather(
            *(replica.launch() for replica in replicas), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        try:
            _raise_fatal(failures, len(replicas))
            launched = [replica for replica in replicas if replica.client is not None]
            self._model = _ServedModel.of(launched[0])
            for replica in launched[1:]:
                self._check_model(replica)
        except BaseException:
            await self.close()
            raise
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                replica.cause = str(outcome)
                log.error("%s did not start: %s; it is started again", replica.name, outcome)
            else:
                self._serve(replica)
            self._keepers.append(asyncio.create_task(self._keep(replica)))
        return self._endpoint(launched[0].endpoint)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load new weights into one replica after the other. A replica first finishes its running
        calls, while new calls go to the others. If the load fails, the replica is taken out.
        Raises BackendError if no replica has the new weights."""
        async with self._changing:
            try:
                await self._weights.keep(folder, version)
            except OSError as error:
                raise BackendError(
                    f"the weights for restarted replicas cannot be put into {self._weights.folder} "
                    f"({_reason(error)}): name another folder with --weights-dir"
                ) from None
            failures = [await self._change(each, folder, version) for each in self._running]
            if not self._running:
                causes = "; ".join(dict.fromkeys(filter(None, failures))) or "none is left"
                raise BackendError(f"no replica has taken the new weights: {causes}")

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        async def load(replica: Replica) -> None:
            await replica.rollout.load_policy(name, folder, version)
            replica.policies |= {name}

        await self._for_each(load)

    async def unload_policy(self, name: str) -> None:
        for replica in self._running:
            replica.policies -= {name}
        await self._for_each(lambda replica: replica.rollout.unload_policy(name))

    async def policies(self) -> dict[str, int]:
        """Return the policies that all running replicas hold. A policy that a restarted replica
        lacks is missing, so that the policy is loaded again."""
        held: list[dict[str, int]] = []

        async def read(replica: Replica) -> None:
            policies = await replica.rollout.policies()
            replica.policies = frozenset(policies)
            held.append(policies)

        await self._for_each(read)
        common = set(held[0]).intersection(*held[1:])
        return {name: held[0][name] for name in sorted(common)}

    async def probe(self) -> ProbeReply | None:
        """Return the log-probabilities of the known prompt from each running replica. The replicas
        are asked at the same time. Return None if the engine cannot report them. Raises
        ActionFailed if a healthy replica refuses. A replica that does not answer is taken out.
        Raises BackendError if no replica is left."""
        replicas = [(replica, replica.client) for replica in self._running]
        outcomes = await asyncio.gather(
            *(replica.rollout.probe() for replica, _ in replicas), return_exceptions=True
        )
        replies: dict[str, ProbeReply] = {}
        refusal: BaseException | None = None
        for (replica, client), outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, ProbeReply):
                replies[replica.name] = outcome
            elif outcome is None or replica.client is not client:  # it was restarted meanwhile
                continue
            elif isinstance(outcome, BackendError) and not await _refuses(replica, outcome):
                replica.condemn(str(outcome))  # isolated: the other replicas go on
            else:
                refusal = refusal or outcome
        if refusal is not None:
            raise refusal
        if not self._running:
            raise BackendError("no replica has answered the known prompt")
        first = next(iter(replies.values()), None)
        return None if first is None else replace(first, replicas=replies)

    def take_out(self, name: str, cause: str) -> None:
        """Send no more calls to a replica, and start it again with the fleet's current weights."""
        self._replicas[name].condemn(cause)

    async def health(self) -> bool:
        """Return True if at least one replica answers a health check."""
        checks = await asyncio.gather(*(replica.rollout.health() for replica in self._running))
        return any(checks)

    async def lost(self) -> str:
        """Wait until no replica is left. Return a message with the causes."""
        await self._all_out.wait()
        causes = [f"{each.name}: {each.cause}" for each in self._replicas.values() if each.cause]
        return f"all {len(self._replicas)} replicas are gone ({'; '.join(causes)})"

    async def close(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._all_out.set()
        self._wake_waiting()
        await self._weights.remove()

    # --- one replica

    async def _keep(self, replica: Replica) -> None:
        """Watch a replica, and start it again whenever it ends."""
        while True:
            if replica.client is None:
                await self._relaunch(replica)
            try:
                cause = await self._run(replica)
            # Isolated: a replica that nothing watches would never be started again.
            except Exception as failure:
                log.exception("%s can no longer be watched", replica.name)
                cause = f"it can no longer be watched: {failure}"
            replica.condemn(cause)
            self._note_out()
            replica.num_restarts += 1
            log.error("%s is taken out: %s; it is started again", replica.name, cause)
            await _close(replica)

    async def _relaunch(self, replica: Replica) -> None:
        """Start a replica's engine. Repeat the start until it succeeds."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await replica.launch()
                return self._check_model(replica)
            # Isolated: the other replicas go on.
            except Exception as failure:
                replica.cause = str(failure)
                log.error("%s did not start: %s; next try in %g s", replica.name, failure, pause_s)
                await _close(replica)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _run(self, replica: Replica) -> str:
        """Let a launched replica answer calls, and wait until it ends. Return the cause. A replica
        that was started again first gets the fleet's current weights."""
        ended = asyncio.ensure_future(replica.wait_until_ended())
        ready: asyncio.Future[None] | None = None
        try:
            if replica.is_out:
                ready = asyncio.ensure_future(self._bring_up(replica))
                await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done() and (failure := ready.exception()) is not None:
                    return f"it did not take the current weights: {failure}"
            return await ended
        finally:
            parts: list[asyncio.Future[Any]] = [ended] if ready is None else [ended, ready]
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _bring_up(self, replica: Replica) -> None:
        """Load the fleet's current weights into a restarted replica, and let it answer calls."""
        async with self._changing:
            version = self._weights.version
            if version is not None:
                await replica.rollout.load_weights(self._weights.folder, version)
            self._serve(replica)
        log.info("%s serves again, with version %s", replica.name, version or 0)

    async def _change(self, replica: Replica, folder: Path, version: int) -> str | None:
        """Load new weights into one replica. Return the failure as text, or None."""
        if replica.is_out:  # it died while another replica took the weights
            return replica.cause
        others = [each for each in self._running if each is not replica]
        if any(each.state is ReplicaState.SERVING for each in others):
            replica.phase = ReplicaState.DRAINING
            await _drain(replica.endpoint.gate)
        if replica.is_out:
            return replica.cause
        replica.phase = ReplicaState.LOADING
        try:
            await replica.rollout.load_weights(folder, version)
        except BaseException as failure:
            if not replica.is_out:  # otherwise its death is handled already
                replica.condemn(f"it did not take new weights: {failure}")
            if not isinstance(failure, BackendError):
                raise
            return str(failure)  # isolated: the other replicas go on
        if not replica.is_out:
            replica.phase = ReplicaState.SERVING
        return None

    def _serve(self, replica: Replica) -> None:
        replica.phase = ReplicaState.SERVING
        self._all_out.clear()
        self._wake_waiting()

    def _note_out(self) -> None:
        if not self._running:
            self._all_out.set()

    async def _for_each(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        """Run an action on every running replica. Raises the first failure that concerns the action
        itself. A replica that does not answer is left to its health checks. Raises BackendError if
        no replica answers."""
        failure: BackendError = BackendError("no replica is running")
        num_done = 0
        for replica in self._running:
            try:
                await action(replica)
                num_done += 1
            except (ActionFailed, BackendRefused):
                raise
            except BackendError as error:  # isolated: the other replicas go on
                replica.suspect()
                failure = error
        if not num_done:
            raise failure

    def _check_model(self, replica: Replica) -> None:
        """Raise BackendRefused if a replica serves another model than the fleet."""
        model = _ServedModel.of(replica)
        if self._model is None:
            self._model = model
        difference = self._model.difference(model)
        if difference is not None:
            raise BackendRefused(difference)

    def _endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint of the fleet. Its socket and its URL are those of one replica. Calls
        use the clients that `client_for` chooses."""
        refusals = [each.endpoint.refusal for each in self._running]
        # Calls pass the gates of the replicas, and each of these has a name of its own.
        refusal = next(filter(None, refusals), None)
        return replace(endpoint, refusal=refusal, gate=WeightGate(), replica=None)


async def _close(replica: Replica) -> None:
    """End a replica's engine. If this fails, only log the failure: the next start ends it, too."""
    try:
        await replica.close()
    # Isolated: the replica must be started again.
    except Exception as failure:
        log.warning("%s could not be closed: %s", replica.name, failure)


def _reason(error: OSError) -> str:
    """Return the reason of a failed copy. The error of a folder names those of its files."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][-1])
    return error.strerror or str(error)


async def _drain(gate: WeightGate) -> None:
    """Wait until a replica has had no running call for SETTLE_S, but at most DRAIN_BOUND_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_BOUND_S):
            is_idle = False
            while not is_idle:
                await gate.wait_until_idle(DRAIN_BOUND_S)
                num_begun = gate.num_begun
                await asyncio.sleep(SETTLE_S)
                is_idle = gate.num_begun == num_begun


def _raise_fatal(failures: Sequence[BaseException], num_replicas: int) -> None:
    """Raise the failure of a start that another start would repeat, or any failure if no replica
    has started."""
    for failure in failures:
        if isinstance(failure, BackendRefused) or not isinstance(failure, BackendError):
            raise failure
    if len(failures) == num_replicas:
        raise failures[0]


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """What all replicas of a fleet must have in common."""

    replica: str
    model_name: str
    max_model_len: int
    version: str | None
    """Version of the engine; None if the engine does not report it."""

    @staticmethod
    def of(replica: Replica) -> _ServedModel:
        assert replica.client is not None, "the replica has been launched"
        info = replica.client.info
        return _ServedModel(
            replica.name, str(info.model), int(info.max_model_len or 0), info.version
        )

    def difference(self, other: _ServedModel) -> str | None:
        """Return one line about the first difference between two replicas. Return None if there is
        none."""
        names: Sequence[tuple[str, object, object]] = (
            ("the model", self.model_name, other.model_name),
            ("a context length of", self.max_model_len, other.max_model_len),
            ("version", self.version, other.version),
        )
        for kind, own, others in names:
            if own != others and None not in (own, others):
                return (
                    f"{self.replica} serves {kind} {own}, and {other.replica} serves {kind} "
                    f"{others}: all replicas of a fleet must serve the same model with the same "
                    "version of the engine"
                )
        return None


async def _refuses(replica: Replica, failure: BackendError) -> bool:
    """Return True if a request failed because the engine refuses it, and False if the engine is
    gone or hangs. An engine that dies during a request also looks as if it refused."""
    return isinstance(failure, ActionFailed) and await replica.rollout.health()
