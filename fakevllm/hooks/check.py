"""Tries the user's hooks on one group and draws what they said, for `fakevllm check-hook`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.table import Table
from rich.text import Text

from fakevllm.hooks.process import HookInfo
from fakevllm.hooks.recorded import RecordedGroup, made_up_group
from fakevllm.hooks.results import FeedbackValue, HookFailure, Json, RewardOutcome, SubmitPlan
from fakevllm.hooks.spec import Feedback
from fakevllm.hooks.worker import HookWorker

CHECK_TIMEOUT_S = 30.0
"""As `hooks.timeout_s` where nothing else is said: what passes here passes in traffic."""
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class CheckReport:
    path: Path
    group: RecordedGroup
    info: HookInfo
    plan: SubmitPlan | HookFailure | None
    """None where there is no on_user_submit_new_requests."""
    outcome: RewardOutcome
    load_s: float
    submit_s: float
    reward_s: float
    feedback: FeedbackValue | HookFailure | None = None
    """Of a thumb up for the first answer; None where there is no on_feedback."""

    @property
    def ok(self) -> bool:
        failed = (isinstance(one, HookFailure) for one in (self.plan, self.feedback))
        return self.outcome.reason is None and not any(failed)


async def check(
    path: Path, group: RecordedGroup | None = None, timeout_s: float = CHECK_TIMEOUT_S
) -> CheckReport:
    """Raises HookError where the hooks cannot be loaded."""
    group = group or made_up_group()
    worker = HookWorker(path, timeout_s)
    try:
        begun = time.perf_counter()
        info = await worker.start()
        loaded = time.perf_counter()
        plan = await worker.submit(group.request_id, group.task) if info.has_submit else None
        planned = time.perf_counter()
        outcome = await worker.reward(group.siblings(), group.answers, group.question)
        done = time.perf_counter()
        feedback = await worker.feedback(_thumb(group)) if info.has_feedback else None
    finally:
        await worker.close()
    times = (loaded - begun, planned - loaded, done - planned)
    return CheckReport(path, group, info, plan, outcome, *times, feedback)


def _thumb(group: RecordedGroup) -> Feedback:
    return Feedback(
        kind="feedback",
        request_id=group.request_id,
        answer=group.answers[0],
        question=group.question,
        messages=group.messages,
        task=group.task,
        thumbs="up",
    )


def render(report: CheckReport) -> Table:
    title = Text(f"{report.path}  hash {report.info.content_hash}")
    table = Table(title=title, caption_justify="left", expand=True)
    for name in ("sibling", "finish"):
        table.add_column(name, no_wrap=True)
    table.add_column("answer", ratio=3)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("annotations", ratio=2)
    rewards = report.outcome.rewards
    ranks = _ranks(rewards) if rewards is not None else ["-" for _ in report.group.answers]
    for index, answer in enumerate(report.group.answers):
        table.add_row(
            str(index),
            str(answer.get("finish_reason")),
            Text(_shown(answer)),
            "-" if rewards is None else _reward(rewards[index]),
            ranks[index],
            Text(_annotations(report.outcome, index)),
        )
    table.caption = _caption(report)
    return table


def _caption(report: CheckReport) -> Text:
    caption = Text()
    if isinstance(report.plan, HookFailure):
        caption.append(f"on_user_submit_new_requests failed: {report.plan.reason}\n", "bold red")
    else:
        caption.append(f"on_user_submit_new_requests: {_plan(report.plan)}\n")
    if isinstance(report.feedback, HookFailure):
        caption.append(f"on_feedback failed: {report.feedback.reason}\n", "bold red")
    elif report.feedback is not None:
        caption.append(f"on_feedback: a thumb up counts for {report.feedback.value}\n")
    if report.outcome.reason is not None:
        caption.append(f"on_compute_relative_reward failed: {report.outcome.reason}\n", "bold red")
    elif no_signal := _why_no_signal(report.outcome.rewards or []):
        caption.append(f"no signal: {no_signal}\n", "yellow")
    caption.append(f"question: {_short(report.group.question)}\n")
    caption.append(f"load {report.load_s:.2f} s, submit {report.submit_s:.3f} s, ")
    caption.append(f"reward {report.reward_s:.3f} s")
    return caption


def _why_no_signal(rewards: Sequence[float | None]) -> str | None:
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return "fewer than two rewards are numbers; in traffic such a group is dropped (--ledger \
FILE tries a question of yours)"
    return None if len(set(known)) > 1 else "a group whose rewards are all equal teaches nothing"


def _plan(plan: SubmitPlan | None) -> str:
    if plan is None:
        return "not defined, N stays"
    if plan.num is not None:
        return f"{plan.num} siblings"
    if plan.overrides is None:
        return "None, N stays"
    return f"{len(plan.overrides)} siblings, {_short(orjson.dumps(plan.overrides).decode())}"


def _ranks(rewards: Sequence[float | None]) -> list[str]:
    """
    >>> _ranks([0.5, 1.0, None, 0.5])
    ['2', '1', '-', '2']
    """
    known = [reward for reward in rewards if reward is not None]
    return ["-" if own is None else str(1 + sum(other > own for other in known)) for own in rewards]


def _reward(reward: float | None) -> str:
    return "None" if reward is None else f"{reward:.4g}"


def _shown(answer: Json) -> str:
    if answer.get("content"):
        return _short(str(answer["content"]))
    calls: list[Json] = answer.get("tool_calls") or []
    functions: list[Json] = [call["function"] for call in calls]
    return _short(", ".join(f"{one['name']}({one['arguments']})" for one in functions))


def _annotations(outcome: RewardOutcome, index: int) -> str:
    notes = outcome.annotations[index] if index < len(outcome.annotations) else {}
    return _short(orjson.dumps(notes).decode()) if notes else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"
