"""The policies of the arms: each arm but the training arm answers with one version of the weights,
which the engine holds beside the served ones.

Trouble with a version never fails a request: the served weights then answer, and the record of the
group says why. The server keeps a version for some time only, so it is requested again and again.
This also loads the version after the engine was started again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import aiohttp

from fakevllm.release.arms import Arm
from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm.swarm.server_connection import LOAD_TIMEOUT_S, SwarmLink
from fakevllm_adapters.protocol.policy_names import policy_name

log = logging.getLogger("fakevllm.groups.arm_policies")

KEEP_EVERY_S = 60.0
"""Seconds between two requests to keep a version. The server keeps it for ten minutes."""
RETRY_EVERY_S = 15.0
"""Seconds after a failure before the version is requested again."""
MAX_WAIT_S = 10.0
"""Seconds for which a request of an app waits until its version is loaded. Then the served weights
answer. Loading may take minutes, because a process of its own reads the checkpoint."""
OLD_SERVER = "the server does not know policies: update fakevllm-server"


class _ArmPolicy:
    """The policy of one arm."""

    def __init__(
        self, link: SwarmLink, arm: Arm, version: int, advice: str, replaced: int | None = None
    ) -> None:
        """Create the policy. `replaced` is a version that answers apps no more. It is unloaded
        first, because the server keeps only few such versions."""
        self.version = version
        self._replaced = replaced
        self.trouble: str | None = "not loaded yet"
        """Reason why the policy cannot be sampled; None if it can."""
        self._link = link
        self._arm = arm
        self._advice = advice
        self._loading: asyncio.Task[None] | None = None
        self._started_at = 0.0
        """Time at which the last load began."""
        self._failed_at: float | None = None
        self._reported: str | None = None
        """Trouble that was logged last."""

    async def wait_loaded(self, max_s: float) -> str | None:
        """Wait until the version is loaded, until `max_s` seconds after the load began. Return the
        reason if it cannot be sampled, else None."""
        now_s, failed_at = time.monotonic(), self._failed_at
        is_failing = failed_at is not None and now_s - failed_at < RETRY_EVERY_S
        if self.trouble is not None and not is_failing:
            loading = self.start()
            # Only the first requests wait for a load that takes long.
            wait_s = self._started_at + max_s - now_s
            if wait_s > 0:
                await asyncio.wait({loading}, timeout=wait_s)
        return self.trouble

    def start(self) -> asyncio.Task[None]:
        """Start to load the version, if it is not being loaded. Return the task that loads it."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
            self._started_at = time.monotonic()
        return self._loading

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
        self.trouble = trouble
        self._failed_at = None if trouble is None else time.monotonic()
        if trouble is None:
            self._reported = None
        elif trouble != self._reported and (is_final or self._link.is_serving):
            self._reported = trouble
            log.warning(
                "version %d of the %s arm cannot be sampled: %s; until it can, the newest weights "
                "answer the arm's sessions, which are not measured. %s",
                self.version,
                self._arm.value,
                trouble,
                self._advice,
            )

    async def _request(self) -> tuple[str | None, bool]:
        """Request the version. Return (trouble, whether the server has refused the version)."""
        if self._replaced is not None:
            await self._link.unload_policy(self._replaced, pinned=True)
            self._replaced = None
        try:
            reply = await self._link.load_policy(self.version, pinned=True)
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
        self._policies = {
            arm: _ArmPolicy(link, arm, version, advice) for arm, version in versions.items()
        }

    async def run(self) -> None:
        """Keep the versions loaded, until this task is cancelled."""
        while True:
            await self._link.serving.wait()
            for policy in self._policies.values():
                await asyncio.wait({policy.start()})
            is_failing = any(policy.trouble for policy in self._policies.values())
            await asyncio.sleep(RETRY_EVERY_S if is_failing else KEEP_EVERY_S)

    async def close(self) -> None:
        for policy in self._policies.values():
            await policy.close()

    def set_version(self, arm: Arm, version: int) -> None:
        """Let another version answer an arm, and start to load it."""
        before = self._policies[arm].version
        if before == version:
            return
        self._policies[arm].cancel()
        others = {policy.version for other, policy in self._policies.items() if other is not arm}
        replaced = None if before in others else before
        self._policies[arm] = _ArmPolicy(self._link, arm, version, self._advice, replaced)
        self._policies[arm].start()

    def model(self, arm: Arm) -> str:
        """Return the model name by which calls are sampled by the arm's version."""
        return policy_name(self._policies[arm].version)

    def trouble(self, arm: Arm) -> str | None:
        """Return the reason why the arm's version cannot be sampled; None if it can, or if the arm
        has no version of its own."""
        policy = self._policies.get(arm)
        return None if policy is None else policy.trouble

    async def wait_loaded(self, arm: Arm) -> str | None:
        """Wait until the arm's version is loaded, but not for long. Return the reason if it cannot
        be sampled, else None."""
        return await self._policies[arm].wait_loaded(MAX_WAIT_S)

    async def reload(self, arm: Arm) -> str | None:
        """Load the arm's version again, after the engine did not know it. Return the reason if that
        fails, else None."""
        self._policies[arm].mark_lost()
        return await self.wait_loaded(arm)
