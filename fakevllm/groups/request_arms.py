"""Assign requests to arms. The arm of a request decides which weights answer the request.

All requests of a session tree have the same arm, because the arm depends on the tree's root. A
session tree contains all turns of a conversation, its forks and its sub-agents. A request without a
place in a session forms a tree of its own. The root of this tree is the request's id.

A request that the proxy cannot parse has no arm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from fakevllm.gate.arm_policies import ArmPolicies
from fakevllm.groups.group_record import GroupDraft
from fakevllm.ledger.arm_reads import ArmReads
from fakevllm.ledger.records import GroupRecord
from fakevllm.release.arm_gains import ArmGains, ArmSummary, GroupOutcome
from fakevllm.release.arms import Arm, ArmAssigner
from fakevllm.transport.request import Request
from fakevllm.transport.request_arm import RequestArm
from fakevllm_adapters.formats.model_name import RenamingExchange

log = logging.getLogger("fakevllm.groups.request_arms")

MODEL_UNKNOWN = "the server has not reported its model yet"
MAX_BUFFERED = 100_000
"""Maximum number of groups that are buffered because they end while the ledger is read. The
buffered groups are added to the statistics of the arms afterwards. Further groups are left out of
the statistics.
"""
ADDED_AT_ONCE = 500
"""Number of earlier groups that are added to the statistics without a pause for other asyncio
tasks. Adding this number of groups takes some milliseconds."""


class RequestArms:
    """Assigns the requests of a proxy to arms, and compares the rewards of the arms. An arm decides
    which weights answer a session."""

    def __init__(
        self,
        assigner: ArmAssigner,
        policies: ArmPolicies,
        gains: ArmGains,
        reads: ArmReads,
        served_model: Callable[[], str | None],
    ) -> None:
        """Create the object. `reads` reads the groups of earlier proxy processes, and
        `served_model` returns the served model's name, or None while it is unknown."""
        self.policies = policies
        self._assigner = assigner
        self._gains = gains
        self._reads = reads
        self._served_model = served_model
        self.on_outcome: Callable[[GroupOutcome], None] | None = None
        """Callback that is called with the outcome of each group that ends with rewards. Groups
        that an older version of an arm's weights answered are left out."""
        self._newest_row = reads.newest_row()
        self._buffered: list[GroupOutcome] | None = []
        """Groups that ended before the ledger was read; None after the ledger was read."""

    async def run(self) -> None:
        """Read the groups of earlier proxy processes from the ledger. After that, keep each arm's
        version of the weights loaded in the engine, until this task is cancelled. An arm decides
        which version answers a session."""
        await self.read_earlier()
        await self.policies.run()

    def assign(self, draft: GroupDraft) -> None:
        """Set the arm of the request in `draft`. An arm decides which weights answer a session.

        Call this method before the app's response is created. If a policy (a set of weights beside
        the served weights) answers the request, the response must show the model name that the app
        sent.
        """
        request = draft.request
        if request.exchange is None:
            return
        draft.place()
        root = None if draft.placement is None else draft.placement.root()
        assignment = self._assigner.assign(root or request.id)
        arm = RequestArm(assignment.arm, assignment.propensity, root or request.id)
        request.arm = arm
        if arm.is_training:
            return
        name = _requested_name(request) or self._served_model()
        if name is None:
            return arm.use_served_weights(MODEL_UNKNOWN)
        if request.alias is None:
            request.exchange = RenamingExchange(
                request.exchange, name, is_active=lambda: arm.policy is not None
            )
        arm.policy, arm.reload = self.policies.model(arm.arm), self._reload

    async def prepare(self, request: Request) -> None:
        """Wait until the engine has loaded the weights of the request's arm. (An arm decides which
        version of the weights answers a session.) If the weights cannot be loaded, let the served
        weights answer the request.

        If the engine does not serve at present, do not wait here, because the request waits for the
        engine later. If the engine then lacks the weights, they are loaded when the request is
        sent.
        """
        arm = request.arm
        if arm is None or arm.policy is None:
            return
        if self.policies.is_serving:
            trouble = await self.policies.wait_loaded(arm.arm)
            if trouble is not None:
                return arm.use_served_weights(trouble)
        arm.policy = self.policies.model(arm.arm)
        name, served = _requested_name(request), self._served_model()
        if request.alias is None and name is not None and name != served:
            arm.use_served_weights("unknown model")  # the engine refuses the name

    async def _reload(self, arm: RequestArm) -> str | None:
        trouble = await self.policies.reload(arm.arm, arm.policy)
        if arm.policy is not None:  # no other call of the request has given up meanwhile
            arm.policy = self.policies.model(arm.arm)
        return trouble

    def group_ended(self, request: Request, group: GroupRecord) -> None:
        """Add the rewards of an ended group to the statistics of the group's arm (the sessions
        that one version of the weights answers). Do nothing for a group without rewards."""
        outcome = _outcome(request, group)
        if outcome is None:
            return
        arm = request.arm
        # A group that a replaced version answered says nothing about the arm's present version.
        is_current = arm is None or self.policies.is_current(arm.arm, arm.policy)
        if self.on_outcome is not None and is_current:
            self.on_outcome(outcome)
        if self._buffered is None:
            self._gains.add(outcome)
        elif len(self._buffered) < MAX_BUFFERED:
            self._buffered.append(outcome)

    def summary(self) -> ArmSummary:
        """Return the number of sessions of each arm, and two gains in mean reward. One is the gain
        by training. The other is the gain by choosing the best sibling (sampled answer) of a
        request."""
        # With the time 0, no idle session counts as ended. Before the earlier groups are read, it
        # is not known which sessions have ended.
        now = time.time() if self._buffered is None else 0.0
        return self._gains.summary(now)

    async def read_earlier(self) -> None:
        """Add the groups of earlier proxy processes to the statistics of the arms. These groups are
        read from the ledger. Then add the groups that ended while the ledger was read."""
        try:
            groups = await asyncio.to_thread(lambda: list(self._reads.outcomes(self._newest_row)))
            for start in range(0, len(groups), ADDED_AT_ONCE):
                self._gains.add_all(groups[start : start + ADDED_AT_ONCE])
                await asyncio.sleep(0)
        except Exception:  # isolates: requests are answered without the gains
            log.exception("the gains of earlier sessions could not be read")
        while self._buffered:
            self._gains.add_all(self._buffered[:ADDED_AT_ONCE])
            del self._buffered[:ADDED_AT_ONCE]
            await asyncio.sleep(0)
        self._buffered = None

    async def close(self, running: asyncio.Task[None]) -> None:
        """Stop `running` (the task that executes `run`) and everything that this task has
        started."""
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await self.policies.close()


def _requested_name(request: Request) -> str | None:
    return request.model or None


def _outcome(request: Request, group: GroupRecord) -> GroupOutcome | None:
    arm = request.arm
    if arm is None or group.arm_propensity is None or group.arm is None:
        return None
    rewards = [sibling.reward for sibling in group.siblings if sibling.reward is not None]
    sampled = [
        sibling.reward
        for sibling in group.siblings
        if sibling.reward is not None and not (group.served_by == "greedy" and sibling.index == 0)
    ]
    if len(rewards) < 2 or not sampled or group.served_index is None:
        return None
    served = next((one.reward for one in group.siblings if one.served), None)
    mean = sum(sampled) / len(sampled)
    return GroupOutcome(
        arm.root, Arm(group.arm), group.received_at, mean, served, min(rewards), max(rewards)
    )
