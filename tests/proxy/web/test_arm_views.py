"""The arms and the gains are shown in the statistics, in the metrics and in the status."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm.config.model import load
from fakevllm.ledger.store import Ledger
from fakevllm.release.arm_gains import SESSION_IDLE_S
from fakevllm.runtime.status_rows import arm_rows
from fakevllm.web.arm_views import arm_stats
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm_adapters.protocol.swarm import LoadPolicyReply
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ScriptedSwarm, until

REFUSED = LoadPolicyReply(success=False, failure_reason="Version 0 is gone.")
OPEN = "1 session, counted ten minutes after its last request"


@asynccontextmanager
async def opened(folder: Path, **release: Any) -> AsyncGenerator[ProxyComponents]:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = REFUSED
        flags = {
            "proxy": {"run_dir": folder},
            "swarm": {"url": swarm.url},
            "hooks": {"path": write_hooks(folder / "hooks", PREFER_YES)},
            "release": release,
        }
        async with open_proxy(load(None, flags)) as proxy:
            yield proxy


def record_sessions(folder: Path, *, reward: float = 1.0) -> None:
    """Record a counted session of each arm, and one that is still open."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    now = time.time()
    for name, arm, rewards, at in (
        ("b", "baseline", [0.0, 0.5], now - 2 * SESSION_IDLE_S),
        ("t", "training", [0.5, reward], now - 2 * SESSION_IDLE_S),
        ("open", "training", [0.5, 0.5], now),
    ):
        record = group(name, rewards, served=1, received_at=at, state="pooled")
        record = replace(record, arm=arm, arm_propensity=0.5)
        ledger.record(record)
    assert ledger.drain()
    ledger.close()


async def test_the_gains_of_earlier_processes_are_shown(tmp_path: Path) -> None:
    record_sessions(tmp_path)
    async with opened(tmp_path, baseline_share=0.5) as proxy:
        arms = proxy.arms
        assert arms is not None
        await until(lambda: bool(arms.summary().sessions) and arm_stats(arms).trouble != {})
        stats = arm_stats(arms).model_dump(mode="json")
        text = proxy.metrics.text().decode()
    assert list(arm_rows(stats)) == [
        ("baseline arm", "1 session, mean reward 0.250"),
        ("training arm", "1 session, mean reward 0.750"),
        ("open", OPEN),
        ("gain of the policy", "+0.500 (-1.000 to +1.000), from 1 pair of sessions"),
        ("gain of choosing", "+0.250 (-1.000 to +1.000), from 1 session"),
        ("baseline arm", f"cannot be sampled: {stats['trouble']['baseline']}"),
    ]
    assert 'fakevllm_arm_sessions{arm="baseline"} 1.0' in text
    assert 'fakevllm_arm_reward{arm="training"} 0.75' in text
    assert 'fakevllm_policy_gain{bound="mean"} 0.5' in text
    assert 'fakevllm_choice_gain{bound="low"} -1.0' in text


async def test_a_reward_outside_of_the_range_hides_the_intervals(tmp_path: Path) -> None:
    record_sessions(tmp_path, reward=2.0)
    async with opened(tmp_path, baseline_share=0.5) as proxy:
        arms = proxy.arms
        assert arms is not None
        await until(lambda: bool(arms.summary().sessions))
        shown = dict(arm_rows(arm_stats(arms).model_dump(mode="json")))
    assert shown["gain of the policy"] == "+1.000, from 1 pair of sessions"
    assert "a reward of 2 is outside of release.reward_range" in shown["no intervals"]


async def test_a_wider_range_gives_intervals_again(tmp_path: Path) -> None:
    record_sessions(tmp_path, reward=2.0)
    async with opened(tmp_path, baseline_share=0.5, reward_range=(0, 2)) as proxy:
        arms = proxy.arms
        assert arms is not None
        await until(lambda: bool(arms.summary().sessions))
        assert arm_stats(arms).reward_outside is None
        gain = arm_stats(arms).policy_gain
        assert gain is not None and gain.low is not None


async def test_without_a_share_there_are_no_arms(tmp_path: Path) -> None:
    async with opened(tmp_path) as proxy:
        assert proxy.arms is None
        assert b"fakevllm_arm" not in proxy.metrics.text()


def test_the_gain_of_the_policy_is_not_shown_if_a_release_gate_has_no_baseline() -> None:
    arms: dict[str, Any] = {
        "sessions": {},
        "open_sessions": 0,
        "policy_gain": None,
        "choice_gain": None,
    }
    assert "gain of the policy" in dict(arm_rows(arms))
    assert "gain of the policy" not in dict(arm_rows(arms, is_gated=True))
    arms |= {"sessions": {"baseline": 1}, "means": {"baseline": 0.5}}
    assert "gain of the policy" in dict(arm_rows(arms, is_gated=True))


async def test_a_share_without_hooks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"proxy": {"run_dir": tmp_path}, "release": {"baseline_share": 0.1}}
    async with open_proxy(load(None, flags)) as proxy:
        assert proxy.arms is None
    assert "release.baseline_share has no effect without hooks" in caplog.text
