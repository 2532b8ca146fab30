"""Start the object that assigns sessions to arms, if the configuration has several arms."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fakevllm.config.release import ReleaseSection
from fakevllm.errors import ConfigError
from fakevllm.gate.arm_policies import ArmPolicies
from fakevllm.groups.request_arms import RequestArms
from fakevllm.release.arm_gains import ArmGains
from fakevllm.release.arms import Arm, ArmAssigner, Shares
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm.web.arm_views import add_arm_gauges
from fakevllm.web.startup.shared_parts import SharedParts

log = logging.getLogger("fakevllm.web.startup")

_BASELINE_ADVICE = (
    "Set release.baseline_version to a version that can be sampled, or release.baseline_share to 0."
)
_RELEASED_ADVICE = (
    "Release another version with `fakevllm release promote`, or, if the engine cannot hold "
    "several versions (vLLM can if the server starts it with --engine-arg=--enable-lora for a job "
    'with lora_rank), set release.evaluation to "between_steps".'
)


def open_arms(parts: SharedParts, stack: contextlib.AsyncExitStack) -> RequestArms | None:
    """Return the object that assigns sessions to arms. The arm of a session decides which weights
    answer the session. Return None if all sessions are in the training arm, which the served
    weights answer."""
    config, ledger, link = parts.config, parts.ledger, parts.link
    release = config.release
    if release.is_gated and config.hooks.path is None:
        raise ConfigError(
            'release.mode "gated" needs hooks, which score the held-out rows: set hooks.path, or '
            "take release.mode out."
        )
    if release.baseline_share == 0 and not release.has_released_arm:
        return None
    if config.hooks.path is None:
        log.warning(
            "release.baseline_share has no effect without hooks, because nothing is trained: set "
            "hooks.path, or take it out"
        )
        return None
    shares, versions, advice = _plan(release)
    with ledger.reading():
        arms = RequestArms(
            ArmAssigner(ledger.arm_salt(), shares),
            ArmPolicies(link, versions, advice),
            ArmGains(RewardRange(*release.reward_range)),
            ledger.arms,
            lambda: link.model,
        )
    stack.push_async_callback(arms.close, asyncio.create_task(arms.run()))
    add_arm_gauges(parts.metrics, arms)
    return arms


def _plan(release: ReleaseSection) -> tuple[Shares, dict[Arm, int], str]:
    """Return the shares of the arms, the versions of the arms with fixed weights, and the advice
    for the case that the engine cannot sample one of these versions."""
    versions = {Arm.BASELINE: release.baseline_version} if release.baseline_share else {}
    if not release.has_released_arm:
        shares = Shares.continuous(release.baseline_share)
        return shares, versions, _BASELINE_ADVICE
    rest = 1 - release.canary_share - release.baseline_share
    versions[Arm.RELEASED] = 0  # until the gate has read which version is released
    return Shares(release.canary_share, rest, release.baseline_share), versions, _RELEASED_ADVICE
