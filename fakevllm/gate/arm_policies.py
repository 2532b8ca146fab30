"""Load the version of the weights that answers each arm. An arm is a share of the sessions. The
newest weights answer the training arm. Each other arm has a policy, which is one fixed version that
the engine holds beside the newest weights.

If a version cannot be loaded or sampled, the newest weights answer the arm's requests. The record
of each such request gives the reason. After each load request, the server keeps a version for ten
minutes. This module therefore sends a load request for each version every minute, and sooner after
a failure. After a restart of the engine, the load request loads the version again.

An arm may get another version. The old version answers until the new version is loaded. A rejected
old version stops answering at once, because the server refuses to sample rejected versions.

The server holds only a few versions for apps, and the old version is one of them. The new version
is therefore loaded first in the same way as a version that is only evaluated. After the old version
is unloaded, this module requests the new version again, now as a version for apps.
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
from fakevllm.swarm.server_client import LOAD_TIMEOUT_S
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.protocol.policy_names import policy_name

log = logging.getLogger("fakevllm.gate.arm_policies")

KEEP_EVERY_S = 60.0
"""Seconds between two requests to keep a version. After each request, the server keeps the version
for ten minutes."""
RETRY_EVERY_S = 15.0
"""Seconds after a failure before the version is requested again."""
FIRST_RETRY_S = 1.0
"""Seconds after the first outage before the version is requested again. An outage is a failure
without a refusal, such as a restart of the server or the engine. Each further pause is twice as
long as the pause before, up to RETRY_EVERY_S. Meanwhile, other weights answer the arm's sessions.
"""
MAX_WAIT_S = 10.0
"""Maximum seconds for which a request of an app waits until its version is loaded. After this time,
the served weights answer. Loading may take minutes, because a separate process reads the
checkpoint."""
OLD_SERVER = "the server does not know policies: update fakevllm-server"


class _ArmPolicy:
    """The version that answers one arm (a share of the sessions), and whether it is loaded."""

    def __init__(
        self,
        link: SwarmLink,
        arm: Arm,
        version: int,
        advice: str,
        unload_old: Callable[[], Awaitable[None]],
        on_failed: Callable[[], None],
    ) -> None:
        """Create the policy. `advice` is a sentence for the log that names the settings to change
        if the version cannot be sampled. `on_failed` is called after each failed load of the
        version. `unload_old` unloads versions that no longer answer apps. It is called before this
        version is loaded for apps, because the server holds only a few versions for apps."""
        self.version = version
        self.stand_in: int | None = None
        """Version that answers the arm until `version` is loaded. None if there is no such version.
        In that case, the newest weights answer the arm until `version` is loaded."""
        self.is_leaving = False
        """Whether this version is being replaced by another version. If so, trouble with this
        version needs no remedy."""
        self._unload_old = unload_old
        self._on_failed = on_failed
        self.trouble: str | None = "not loaded yet"
        """Reason why the policy cannot be sampled; None if it can be sampled."""
        self._link = link
        self._arm = arm
        self._advice = advice
        self._loading: asyncio.Task[None] | None = None
        self._started_at = 0.0
        """Time at which the last load began."""
        self._failed_at: float | None = None
        self._num_outages = 0
        """Number of consecutive loads that failed without a refusal."""
        self._reported: str | None = None
        """Trouble that was logged last."""

    async def wait_loaded(self, max_s: float) -> str | None:
        """Wait until the engine has loaded the version that answers this arm (a share of the
        sessions), at most until `max_s` seconds after the load began. Return the reason if the
        version cannot be sampled. Return None if the version can be sampled."""
        now_s, failed_at = time.monotonic(), self._failed_at
        is_failing = failed_at is not None and now_s - failed_at < self.retry_s
        if self.trouble is not None and not is_failing:
            loading = self.start()
            # A load may take long. Only requests in its first `max_s` seconds wait for it.
            wait_s = self._started_at + max_s - now_s
            if wait_s > 0:
                await asyncio.wait({loading}, timeout=wait_s)
        return self.trouble

    @property
    def is_loading(self) -> bool:
        """True while the arm's version of the weights is not loaded and no attempt to load it has
        failed."""
        return self.trouble is not None and self._failed_at is None

    @property
    def retry_s(self) -> float:
        """Seconds to wait after a failed load of the arm's version before the server is asked again
        to load it."""
        if self._num_outages == 0:
            return RETRY_EVERY_S
        return min(RETRY_EVERY_S, FIRST_RETRY_S * 2.0 ** min(self._num_outages - 1, 10))

    def start(self) -> asyncio.Task[None]:
        """Start to load the arm's version of the weights into the engine. If a load is already
        running, do not start a second load. Return the task that loads the version."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
            self._started_at = time.monotonic()
        return self._loading

    async def wait_idle(self) -> None:
        """Wait until no load of the arm's version of the weights is running."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    def mark_lost(self) -> None:
        """Record that the engine no longer holds the arm's version of the weights."""
        if self.trouble is None:
            self.trouble = f"version {self.version} is not loaded"
            self._failed_at = None

    def cancel(self) -> None:
        """Cancel the load of this version of the weights, because no arm (share of the sessions)
        needs it any longer."""
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
        """Ask the server to load the version. Return a pair: the reason of a failure (None after a
        success), and whether the failure is a refusal. All other failures are outages, such as a
        restart of the server."""
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
    """The versions that answer the arms (shares of the sessions), except the training arm."""

    def __init__(self, link: SwarmLink, versions: Mapping[Arm, int], advice: str) -> None:
        """Create the policies. `versions` maps each arm (a share of the sessions) to the version
        that answers the arm. `advice` is a sentence for the log that names the settings to change
        if a version cannot be sampled."""
        self._link = link
        self._advice = advice
        self._failed = asyncio.Event()
        """Event that is set when a version could not be loaded."""
        self._policies = {arm: self._policy(arm, version) for arm, version in versions.items()}
        self._next: dict[Arm, _ArmPolicy] = {}
        """For an arm that is to get another version, the policy of that version. When the new
        policy is loaded, it replaces the arm's present policy."""
        self._changes: dict[Arm, asyncio.Task[None]] = {}
        self._old: set[int] = set()
        """Versions that no longer answer apps, and therefore are to be unloaded."""

    @property
    def is_serving(self) -> bool:
        """Whether the swarm server's engine answers requests at present."""
        return self._link.is_serving

    async def run(self) -> None:
        """Keep the version of each arm (a share of the sessions) loaded in the engine, until this
        task is cancelled."""
        while True:
            await self._link.serving.wait()
            for policy in list(self._policies.values()):
                await asyncio.wait({policy.start()})
            for arm in list(self._next):
                await asyncio.wait({self._start_change(arm)})
            await self._unload_old()
            await self._pause()

    async def _pause(self) -> None:
        """Wait until it is time to ask the server again to load the versions that answer the arms
        (shares of the sessions). If the load of a version fails during the wait, the wait becomes
        shorter."""
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
        """Give an arm (a share of the sessions) another version, and start to load this version.
        The arm's present version answers until the other version is loaded."""
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
        """Return the engine's model name for the version of an arm (a share of the sessions)."""
        return policy_name(self._policies[arm].version)

    def is_current(self, arm: Arm, model: str | None) -> bool:
        """Return True if `model` is the model name of the version that was last assigned to the arm
        (a share of the sessions). Also return True if `model` is None (the newest weights), or if
        the arm has no version of its own."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return model is None or policy is None or model == policy_name(policy.version)

    def trouble(self, arm: Arm) -> str | None:
        """Return the reason why the version that was last assigned to the arm (a share of the
        sessions) cannot be sampled. Return None if it can be sampled, or if the arm has no version
        of its own."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return None if policy is None else policy.trouble

    def is_loading(self, arm: Arm) -> bool:
        """Return True if the arm's version is not loaded, and no attempt to load it has failed so
        far. An arm is a share of the sessions. The arm's version is the one that was last assigned
        to the arm."""
        policy = self._next.get(arm) or self._policies.get(arm)
        return policy is not None and policy.is_loading

    async def wait_loaded(self, arm: Arm) -> str | None:
        """Wait until the version that answers the arm (a share of the sessions) is loaded, at most
        until MAX_WAIT_S seconds after the load began. Return the reason if the version cannot be
        sampled, else None."""
        return await self._policies[arm].wait_loaded(MAX_WAIT_S)

    async def reload(self, arm: Arm, model: str | None) -> str | None:
        """Load the version of an arm (a share of the sessions) again, because the engine did not
        know the model name `model`. Return the reason if the version cannot be sampled, else None.
        """
        if model == self.model(arm):  # and not a version that was replaced meanwhile
            self._policies[arm].mark_lost()
        return await self.wait_loaded(arm)

    def _policy(self, arm: Arm, version: int) -> _ArmPolicy:
        return _ArmPolicy(
            self._link, arm, version, self._advice, self._unload_old, self._failed.set
        )

    def _start_change(self, arm: Arm) -> asyncio.Task[None]:
        change = self._changes.get(arm)
        if change is None or change.done():
            change = self._changes[arm] = asyncio.create_task(self._change(arm))
        return change

    async def _change(self, arm: Arm) -> None:
        while (policy := self._next.get(arm)) is not None:
            # The server refuses to load the old version if the version was rejected. A load that
            # began before the rejection may still succeed, so a new load is started.
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
