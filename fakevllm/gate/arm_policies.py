"""The policies of the arms: each arm but the training arm answers with one version of the weights,
which the engine holds beside the served ones.

Trouble with a version never fails a request: the served weights then answer, and the record of the
group says why. The server keeps a version for some time only, so it is requested again and again.
This also loads the version after the engine was started again.

If an arm gets another version, the old one answers until the new one is loaded, unless the server
refuses the old one, because it was rejected. The server keeps only few versions for apps, so the
new one is first loaded as an evaluation's version, and kept for apps after the old one is unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from fakevllm.release.arms import Arm
from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm.swarm.server_connection import LOAD_TIMEOUT_S, SwarmLink
from fakevllm_adapters.protocol.policy_names import policy_name

log = logging.getLogger("fakevllm.gate.arm_policies")

KEEP_EVERY_S = 60.0
"""Seconds between two requests to keep a version. The server keeps it for ten minutes."""
RETRY_EVERY_S = 15.0
"""Seconds after a failure before the version is requested again."""
FIRST_RETRY_S = 1.0
"""Seconds after a failure without a refusal, such as a restart of the server or the engine, before
the version is requested again. Each pause is twice as long as the one before, up to RETRY_EVERY_S.
Meanwhile, other weights answer the arm's sessions."""
MAX_WAIT_S = 10.0
"""Seconds for which a request of an app waits until its version is loaded. Then the served weights
answer. Loading may take minutes, because a process of its own reads the checkpoint."""
OLD_SERVER = "the server does not know policies: update fakevllm-server"


class _ArmPolicy:
    """The policy of one arm."""

    def __init__(
        self,
        link: SwarmLink,
        arm: Arm,
        version: int,
        advice: str,
        unload_old: Callable[[], Awaitable[None]],
        on_failed: Callable[[], None],
    ) -> None:
        """Create the policy. `unload_old` unloads the versions that answer apps no more. It is
        called before the version is requested for apps, because the server keeps only few such
        versions. `on_failed` is called when the version could not be loaded."""
        self.version = version
        self.stand_in: int | None = None
        """Version that answers the arm until this one is loaded. None if this one does, or, until
        it is loaded, the newest weights."""
        self.is_leaving = False
        """Whether another version replaces this one, so that its trouble needs no remedy."""
        self._unload_old = unload_old
        self._on_failed = on_failed
        self.trouble: str | None = "not loaded yet"
        """Reason why the policy cannot be sampled; None if it can."""
        self._link = link
        self._arm = arm
        self._advice = advice
        self._loading: asyncio.Task[None] | None = None
        self._started_at = 0.0
        """Time at which the last load began."""
        self._failed_at: float | None = None
        self._num_outages = 0
        """Number of loads that failed without a refusal, one after the other."""
        self._reported: str | None = None
        """Trouble that was logged last."""

    async def wait_loaded(self, max_s: float) -> str | None:
        """Wait until the version is loaded, until `max_s` seconds after the load began. Return the
        reason if it cannot be sampled, else None."""
        now_s, failed_at = time.monotonic(), self._failed_at
        is_failing = failed_at is not None and now_s - failed_at < self.retry_s
        if self.trouble is not None and not is_failing:
            loading = self.start()
            # Only the first requests wait for a load that takes long.
            wait_s = self._started_at + max_s - now_s
            if wait_s > 0:
                await asyncio.wait({loading}, timeout=wait_s)
        return self.trouble

    @property
    def is_loading(self) -> bool:
        """Whether the version is not loaded yet, and no attempt to load it has failed."""
        return self.trouble is not None and self._failed_at is None

    @property
    def retry_s(self) -> float:
        """Seconds after a failure before the version is requested again."""
        if self._num_outages == 0:
            return RETRY_EVERY_S
        return min(RETRY_EVERY_S, FIRST_RETRY_S * 2.0 ** min(self._num_outages - 1, 10))

    def start(self) -> asyncio.Task[None]:
        """Start to load the version, if it is not being loaded. Return the task that loads it."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
            self._started_at = time.monotonic()
        return self._loading

    async def wait_idle(self) -> None:
        """Wait until no load of the version is running."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    def mark_lost(self) -> None:
        """Record that the engine does not hold the version any more."""
        if self.trouble is None:
            self.trouble = f"version {self.version} is not loaded"
            self._failed_at = None

    def cancel(self) -> None:
        """Stop to load the version, because it is not needed any more."""
        if self._loading is not None:
            self._loading.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)

    async def _load(self) -> None:
        trouble, is_final = await self._request()
        if trouble is not None and not is_final and self.trouble is None:
            return  # the engine still holds the version; if it does not, `mark_lost` says so
        self.trouble = trouble
        self._failed_at = None if trouble is None else time.monotonic()
        self._num_outages = 0 if trouble is None or is_final else self._num_outages + 1
        if trouble is not None:
            self._on_failed()
        if trouble is None:
            self._reported = None
        elif self.is_leaving:
            log.info("version %d answers no app any more: %s", self.version, trouble)
        elif trouble != self._reported and (is_final or self._link.is_serving):
            self._reported = trouble
            effect = "the newest weights answer the arm's sessions, which are not measured"
            if self.stand_in is not None:
                effect = f"version {self.stand_in} answers the arm's sessions"
            log.warning(
                "version %d of the %s arm cannot be sampled: %s; until it can, %s. %s",
                self.version,
                self._arm.value,
                trouble,
                effect,
                self._advice,
            )

    async def _request(self) -> tuple[str | None, bool]:
        """Request the version. Return (trouble, whether the server has refused the version)."""
        is_for_apps = self.stand_in is None
        if is_for_apps:
            await self._unload_old()
        try:
            reply = await self._link.load_policy(self.version, pinned=is_for_apps)
        except aiohttp.ClientResponseError as error:
            if error.status in (404, 405):
                return OLD_SERVER, True
            return f"the server {describe_error(error, LOAD_TIMEOUT_S)}", False
        except (*NETWORK_ERRORS, ValueError) as error:
            return f"the server {describe_error(error, LOAD_TIMEOUT_S)}", False
        if not reply.success:
            return reply.failure_reason.rstrip("."), True
        if reply.model != policy_name(self.version):  # the served weights, which training replaces
            return "the engine holds one set of weights", True
        return None, False


class ArmPolicies:
    """The policies of all arms but the training arm."""

    def __init__(self, link: SwarmLink, versions: Mapping[Arm, int], advice: str) -> None:
        """Create the policies. `versions` has the version of each arm. `advice` is a sentence that
        tells the owner which settings to change if a version cannot be sampled."""
        self._link = link
        self._advice = advice
        self._failed = asyncio.Event()
        """Event that is set when a version could not be loaded."""
        self._policies = {arm: self._policy(arm, version) for arm, version in versions.items()}
        self._next: dict[Arm, _ArmPolicy] = {}
        """The policies that replace those of their arms as soon as they are loaded."""
        self._changes: dict[Arm, asyncio.Task[None]] = {}
        self._old: set[int] = set()
        """Versions that are unloaded, because they answer apps no more."""

    @property
    def is_serving(self) -> bool:
        """Whether the engine serves."""
        return self._link.is_serving

    async def run(self) -> None:
        """Keep the versions loaded, until this task is cancelled."""
        while True:
            await self._link.serving.wait()
            for policy in list(self._policies.values()):
                await asyncio.wait({policy.start()})
            for arm in list(self._next):
                await asyncio.wait({self._start_change(arm)})
            await self._unload_old()
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the versions must be requested again. A version that cannot be loaded
        meanwhile makes the pause shorter."""
        is_failing = any(policy.trouble for policy in self._policies.values())
        is_failing = is_failing or bool(self._next or self._old)
        end = time.monotonic() + (self._retry_s() if is_failing else KEEP_EVERY_S)
        with contextlib.suppress(TimeoutError):
            while True:
                self._failed.clear()
                async with asyncio.timeout(end - time.monotonic()):
                    await self._failed.wait()
                end = min(end, time.monotonic() + self._retry_s())

    def _retry_s(self) -> float:
        """Return the seconds until the versions that could not be loaded are requested again."""
        policies = [*self._policies.values(), *self._next.values()]
        pauses = [policy.retry_s for policy in policies if policy.trouble is not None]
        return min(pauses, default=RETRY_EVERY_S)

    async def close(self) -> None:
        for change in self._changes.values():
            change.cancel()
        await asyncio.gather(*self._changes.values(), return_exceptions=True)
        for policy in [*self._policies.values(), *self._next.values()]:
            await policy.close()

    def set_version(self, arm: Arm, version: int) -> None:
        """Let another version answer an arm, as soon as it is loaded. Start to load it."""
        present, waiting = self._policies[arm], self._next.get(arm)
        if (waiting or present).version == version:
            return
        if waiting is not None:
            self._drop(self._next.pop(arm))
        present.is_leaving = present.version != version
        if not present.is_leaving:
            return
        policy = self._next[arm] = self._policy(arm, version)
        policy.stand_in = present.version
        if present.trouble is not None:  # it answers nothing
            self._replace(arm)
        self._start_change(arm)

    def model(self, arm: Arm) -> str:
        """Return the model name by which calls are sampled by the arm's version."""
        return policy_name(self._policies[arm].version)

    def is_current(self, arm: Arm, model: str | None) -> bool:
        """Return True if a policy with this model name is of the version that the arm was given
        last. The newest weights are always current."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return model is None or policy is None or model == policy_name(policy.version)

    def trouble(self, arm: Arm) -> str | None:
        """Return the reason why the version that the arm was given last cannot be sampled; None if
        it can, or if the arm has no version of its own."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return None if policy is None else policy.trouble

    def is_loading(self, arm: Arm) -> bool:
        """Return True if the version that the arm was given last cannot be sampled only because it
        is not loaded yet, and no attempt has failed."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return policy is not None and policy.is_loading

    async def wait_loaded(self, arm: Arm) -> str | None:
        """Wait until the arm has a version that is loaded, but not for long. Return the reason if
        it has none, else None."""
        return await self._policies[arm].wait_loaded(MAX_WAIT_S)

    async def reload(self, arm: Arm, model: str | None) -> str | None:
        """Load the arm's version again, after the engine did not know `model`. Return the reason if
        that fails, else None."""
        if model == self.model(arm):  # and not a version that was replaced meanwhile
            self._policies[arm].mark_lost()
        return await self.wait_loaded(arm)

    def _policy(self, arm: Arm, version: int) -> _ArmPolicy:
        return _ArmPolicy(
            self._link, arm, version, self._advice, self._unload_old, self._failed.set
        )

    def _start_change(self, arm: Arm) -> asyncio.Task[None]:
        """Start to load the arm's next policy, if it is not being loaded. Return the task."""
        change = self._changes.get(arm)
        if change is None or change.done():
            change = self._changes[arm] = asyncio.create_task(self._change(arm))
        return change

    async def _change(self, arm: Arm) -> None:
        while (policy := self._next.get(arm)) is not None:
            # The server refuses the old version if it was rejected. A request that began before
            # the rejection does not tell.
            old = self._policies[arm]
            await old.wait_idle()
            await asyncio.wait({old.start()})
            if old.trouble is None:
                await asyncio.wait({policy.start()})
            if self._next.get(arm) is not policy:
                continue  # the arm got another version meanwhile
            if old.trouble is None and policy.trouble is not None:
                return  # `run` tries again
            self._replace(arm)
        await asyncio.wait({self._policies[arm].start()})

    def _replace(self, arm: Arm) -> None:
        """Let the arm's next policy answer."""
        self._drop(self._policies[arm])
        self._policies[arm] = self._next.pop(arm)
        self._policies[arm].stand_in = None

    def _drop(self, policy: _ArmPolicy) -> None:
        policy.cancel()
        self._old.add(policy.version)

    async def _unload_old(self) -> None:
        policies = [*self._policies.values(), *self._next.values()]
        self._old -= {policy.version for policy in policies}
        for version in sorted(self._old):
            if await self._link.unload_policy(version, pinned=True):
                self._old.discard(version)
