"""Calls through the hook process: the arguments of hooks, and their return values."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from fakevllm.errors import HookError
from fakevllm.hooks.results import HookFailure, SubmitPlan
from tests.proxy.hooks.hook_calls import TASK, Start, reward

SYNC = """
def on_compute_relative_reward(valid_results, all_answers, question):
    for sibling, answer in zip(valid_results, all_answers):
        answer["seen"] = [sibling.index, sibling.task.metadata["answer"], sibling.episode_id,
                          sibling.usage["i"], answer["finish_reason"], question]
    return [len(answer["content"]) for answer in all_answers]
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_hook_gets_siblings_answers_and_question(start: Start, kind: str) -> None:
    worker = await start(SYNC.replace("def", kind, 1))
    outcome = await reward(worker, "a", "bcd", question="why?")
    assert outcome.rewards == [1.0, 3.0]
    assert outcome.reason is None
    assert outcome.annotations[1] == {"seen": [1, "42", "g/1", 1, "stop", "why?"]}
    assert outcome.hook_hash == worker.info.content_hash


async def test_a_hook_gets_the_conversation_before_the_answers(start: Start) -> None:
    worker = await start("""
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.messages == [{"role": "user", "content": "why?"}])
            for sibling in valid_results]
""")
    assert (await reward(worker, "a", "b", question="why?")).rewards == [1.0, 1.0]


async def test_the_two_argument_form_works(start: Start) -> None:
    worker = await start("def on_compute_relative_reward(v, a):\n    return [1, 0]")
    assert (await reward(worker, "a", "b")).rewards == [1.0, 0.0]


async def test_a_sync_hook_may_return_an_awaitable(start: Start) -> None:
    worker = await start("""
import asyncio
async def score():
    await asyncio.sleep(0)
    return [None, 1]
def on_compute_relative_reward(v, a, q):
    return score()
""")
    assert (await reward(worker, "a", "b")).rewards == [None, 1.0]


async def test_the_submit_hook_sets_the_plan_and_without_it_n_stays(start: Start) -> None:
    worker = await start(SYNC)
    assert await worker.submit("r", TASK) == SubmitPlan()
    plan = "[{}, {'seed': int(task.metadata['answer'])}]"
    submit = f"def on_user_submit_new_requests(request_id, task):\n    return {plan}\n"
    worker = await start(SYNC + submit)
    assert worker.info.has_submit
    assert await worker.submit("r", TASK) == SubmitPlan(overrides=[{}, {"seed": 42}])


async def test_a_failed_submit_hook_has_a_reason(start: Start) -> None:
    worker = await start(SYNC + "def on_user_submit_new_requests(r, t):\n    return 0")
    assert await worker.submit("r", TASK) == HookFailure("hook_value: got 0, want at least 1")


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('bad')", "hook_raised: ValueError: bad (hook.py:3)"),
        ("raise SystemExit(3)", "hook_raised: SystemExit: 3 (hook.py:3)"),
        ("raise TimeoutError('mine')", "hook_raised: TimeoutError: mine (hook.py:3)"),
        ("return [1]", "hook_length: got 1, want 2"),
        ("return [1, float('nan')]", "hook_nan: reward 1 is nan"),
        ("return 5", "hook_type: got int, want a list"),
    ],
)
async def test_a_failed_reward_hook_has_a_reason_and_no_rewards(
    start: Start, kind: str, body: str, reason: str
) -> None:
    worker = await start(
        f"{kind} on_compute_relative_reward(v, a, q):\n    a[0]['note'] = 'kept'\n    {body}\n"
    )
    outcome = await reward(worker, "a", "b")
    assert outcome.rewards is None
    assert outcome.reason == reason
    assert outcome.annotations == [{"note": "kept"}, {}]


async def test_async_hooks_run_concurrently_and_sync_hooks_one_at_a_time(start: Start) -> None:
    together = """
import asyncio
waiting = 0
everyone = asyncio.Event()
async def on_compute_relative_reward(v, a, q):
    global waiting
    waiting += 1
    if waiting == 5:
        everyone.set()
    await everyone.wait()
    return [1]
"""
    worker = await start(together)
    outcomes = await asyncio.gather(*(reward(worker, "a") for _ in range(5)))
    assert [outcome.rewards for outcome in outcomes] == [[1.0]] * 5
    alone = """
import threading
turn = threading.Lock()
def on_compute_relative_reward(v, a, q):
    assert turn.acquire(blocking=False)
    sum(range(10_000))
    turn.release()
    return [1]
"""
    worker = await start(alone)
    outcomes = await asyncio.gather(*(reward(worker, "a") for _ in range(20)))
    assert [outcome.rewards for outcome in outcomes] == [[1.0]] * 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "no function `on_compute_relative_reward`"),
        ("import os\nos._exit(3)\n", "ended its process with exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)\n", "ended its process by SIGKILL"),
    ],
)
async def test_hooks_that_cannot_be_loaded_fail_the_start(
    start: Start, text: str, said: str
) -> None:
    with pytest.raises(HookError, match=said):
        await start(text)


async def test_the_parent_never_imports_the_hooks(start: Start, tmp_path: Path) -> None:
    worker = await start(SYNC)
    assert (await reward(worker, "a")).rewards == [1.0]
    files = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    assert str(tmp_path / "hook.py") not in files
