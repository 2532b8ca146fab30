"""Old captured calls are pruned from the journal, and no call that a restart needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import JOB, Run

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.forgetting import ForgetGroupsRequest
from fakevllm_server.journal.forgotten_calls import TrainedCalls, num_calls
from fakevllm_server.training.call_retention import (
    BYTES_PER_MB,
    DAY_S,
    SHARE_KEPT,
    CallRetention,
    CallRules,
)
from fakevllm_server.training.forget_service import ForgetService

TINY = PrivacySettings(max_journal_mb=0.000_001)
SECOND = PrivacySettings(retention_days=1 / DAY_S)


def start(folder: Path, job: TrainJob = JOB) -> Run[LocalBackend]:
    return Run(folder, LocalBackend(), job)


async def train(run: Run[LocalBackend], *names: str) -> None:
    """Train one step with each group. Each step has a checkpoint, and the calls of the first step
    are deleted as soon as its checkpoint is the oldest one."""
    for name in names:
        await run.finish_group(name)
        await run.trained(name)
    assert sorted(run.saved_steps) == list(range(1, len(names) + 1))


async def prune(run: Run[LocalBackend], settings: PrivacySettings, later_s: float = 0.0) -> int:
    service = ForgetService(
        run.journal,
        run.log,
        run.intake,
        run.engine,
        run.loop.between_steps,
        lambda: run.loop.has_planned,
        "run",
    )

    async def forget(group_ids: Sequence[str]) -> None:
        assert (await service.forget(ForgetGroupsRequest(group_ids=list(group_ids)))).success

    def clock() -> float:
        return time.time() + later_s

    return await CallRetention(lambda: settings, lambda: run.journal, forget, clock).prune()


async def test_calls_of_trained_groups_are_pruned_when_the_journal_is_too_large(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    await train(run, "a", "b", "c")
    assert await prune(run, PrivacySettings()) == 0
    assert await prune(run, PrivacySettings(max_journal_mb=1000)) == 0
    assert run.journal.read(num_calls, ["b", "c"]) == 4
    assert await prune(run, TINY) == 2
    assert run.journal.read(num_calls, ["b", "c"]) == 0
    assert await prune(run, TINY) == 0
    await run.stop()


async def test_calls_are_pruned_some_time_after_their_step(tmp_path: Path) -> None:
    run = start(tmp_path)
    await train(run, "a", "b")
    assert await prune(run, SECOND, later_s=-10) == 0
    assert await prune(run, SECOND, later_s=10) == 1
    assert run.journal.read(num_calls, ["b"]) == 0
    await run.stop()


async def test_calls_that_a_restart_needs_stay(tmp_path: Path) -> None:
    rare = JOB.model_copy(update={"save_freq": 100, "batch_size": 2})
    run = start(tmp_path, rare)
    for name in ("a", "b"):
        await run.finish_group(name)
    await run.trained("a")
    await run.finish_group("waits")
    assert await prune(run, TINY) == await prune(run, SECOND, later_s=10) == 0
    assert run.saved_steps == []
    assert run.journal.read(num_calls, ["a", "b", "waits"]) == 6
    theta = run.backend.served_theta
    run.task.cancel()
    run.journal.close()

    again = start(tmp_path, rare)
    await again.rolling()
    assert again.backend.served_theta == theta
    await again.stop()


CALLS = st.lists(st.tuples(st.floats(0, 10 * DAY_S), st.integers(0, 5_000)), max_size=10)


@given(CALLS, st.none() | st.floats(0.01, 12), st.none() | st.floats(0.0001, 0.03), st.integers(0))
def test_the_oldest_calls_go_first_and_no_more_than_needed(
    calls: list[tuple[float, int]], days: float | None, size: float | None, num_bytes: int
) -> None:
    now = 10 * DAY_S
    groups = [TrainedCalls(f"g{n}", at, num) for n, (at, num) in enumerate(sorted(calls))]
    rules = CallRules(PrivacySettings(retention_days=days, max_journal_mb=size))
    chosen = rules.choose(groups, now, num_bytes)
    assert chosen == [one.group_id for one in groups[: len(chosen)]]
    is_too_large = size is not None and num_bytes > size * BYTES_PER_MB
    old = [one for one in groups if days is not None and one.trained_at < now - days * DAY_S]
    assert len(chosen) >= len(old)
    if not is_too_large:
        assert len(chosen) == len(old)
    elif len(chosen) > len(old):
        freed = sum(one.num_bytes for one in groups[: len(chosen) - 1])
        assert size is not None and num_bytes - freed > SHARE_KEPT * size * BYTES_PER_MB


def test_without_settings_every_call_stays() -> None:
    assert not CallRules(PrivacySettings()).are_set


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_journal_is_too_large_only_above_its_limit(limit: float | None) -> None:
    rules = CallRules(PrivacySettings(max_journal_mb=limit))
    assert rules.is_too_large(BYTES_PER_MB + 1) == (limit is not None)
    assert not rules.is_too_large(BYTES_PER_MB)
