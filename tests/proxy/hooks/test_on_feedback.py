"""The hook on_feedback: its argument, and the handling of its return values."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm.errors import HookError
from fakevllm.hooks.check import check, render
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import FeedbackValue, HookFailure
from fakevllm.hooks.spec import Feedback
from tests.proxy.hooks.hook_calls import TASK, Start, reward

REWARD = "def on_compute_relative_reward(v, a):\n    return [0.0 for _ in a]\n"
FEEDBACK = Feedback(
    kind="feedback",
    request_id="g1",
    answer={"content": "7", "finish_reason": "stop"},
    question="3 plus 4?",
    messages=[{"role": "user", "content": "3 plus 4?"}],
    task=TASK,
    reward=0.5,
    thumbs="down",
    edited="It is 7.",
)


async def call_hook(worker: HookWorker) -> FeedbackValue | HookFailure:
    return await worker.feedback(FEEDBACK)


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_the_hook_gets_the_answer_and_the_feedback(start: Start, kind: str) -> None:
    worker = await start(f"""{REWARD}
{kind} on_feedback(feedback):
    assert feedback.answer["content"] == "7" and feedback.thumbs == "down"
    assert feedback.edited == "It is 7." and feedback.comment is None
    assert feedback.messages[0]["content"] == feedback.question == "3 plus 4?"
    return float(feedback.task.metadata["answer"]) + feedback.reward
""")
    assert worker.info.has_feedback
    assert await call_hook(worker) == FeedbackValue(42.5, worker.info.content_hash)


@pytest.mark.parametrize(
    ("returns", "outcome"),
    [
        ("None", None),
        ("1", 1.0),
        ("float('nan')", "hook_nan: got nan"),
        ("'up'", "hook_type: got str, want a number or None"),
        ("1 / 0", "hook_raised: ZeroDivisionError: division by zero (hook.py:4)"),
    ],
)
async def test_the_hook_must_return_a_finite_number_or_none(
    start: Start, returns: str, outcome: float | str | None
) -> None:
    worker = await start(f"{REWARD}\ndef on_feedback(feedback): return {returns}\n")
    value = await call_hook(worker)
    shown = value.reason if isinstance(value, HookFailure) else value.value
    assert shown == outcome


async def test_a_hook_that_hangs_fails_only_its_own_feedback(start: Start) -> None:
    worker = await start(
        f"import time\n{REWARD}\ndef on_feedback(feedback): time.sleep(60)\n", timeout_s=0.5
    )
    assert await call_hook(worker) == HookFailure("hook_timeout: 0.5 s")
    assert (await reward(worker, "a", "b")).rewards == [0.0, 0.0]


async def test_the_hook_is_optional_and_takes_one_parameter(start: Start) -> None:
    assert not (await start(REWARD)).info.has_feedback
    with pytest.raises(HookError, match=r"give it \(feedback\)"):
        await start(f"{REWARD}\ndef on_feedback(a, b): return None\n")


@pytest.mark.parametrize(("returns", "is_ok"), [("0.5", True), ("1 / 0", False)])
async def test_check_hook_calls_the_hook_with_a_thumbs_up(
    tmp_path: Path, returns: str, is_ok: bool
) -> None:
    text = f"{REWARD}\ndef on_feedback(feedback):\n    return feedback.thumbs and {returns}\n"
    (tmp_path / "hook.py").write_text(text)
    report = await check(tmp_path)
    assert report.ok is is_ok
    message = "a thumbs up counts as 0.5" if is_ok else "on_feedback failed: hook_raised"
    assert message in str(render(report).caption)
