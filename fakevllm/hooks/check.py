"""Run the user's hooks once on one group (a request with several answers), and render the results
as a table. The command `fakevllm check-hook` uses this module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.table import Table
from rich.text import Text

from fakevllm.hooks.hook_process import HookInfo
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.recorded_group import RecordedGroup, made_up_group
from fakevllm.hooks.results import FeedbackValue, HookFailure, Json, RewardOutcome, SubmitPlan
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.hooks.spec import Feedback

CHECK_TIMEOUT_S = 30.0
"""Time limit of a hook call in seconds. It equals the default of `hooks.timeout_s`, so that a hook
which passes the check is fast enough for the proxy."""
MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a text in the table."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all hooks on one group (a request with several answers), and the duration of
    each hook in seconds."""

    path: Path
    group: RecordedGroup
    info: HookInfo
    plan: SubmitPlan | HookFailure | None
    """Result of on_user_submit_new_requests; None if this hook is not defined."""
    outcome: RewardOutcome
    load_s: float
    submit_s: float
    reward_s: float
    feedback: FeedbackValue | HookFailure | None = None
    """Result of on_feedback for a thumbs up on the first answer; None if this hook is not
    defined."""

    @property
    def ok(self) -> bool:
        """True if no hook failed in this check."""
        optional_results = (self.plan, self.feedback)
        has_failed = any(isinstance(result, HookFailure) for result in optional_results)
        return self.outcome.reason is None and not has_failed


async def check(
    path: Path,
    group: RecordedGroup | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
    sandbox: HookSandbox = DEFAULT_SANDBOX,
) -> CheckReport:
    """Run all hooks on a group (a request with several answers), and return the report. If `group`
    is None, a made-up group is used.

    Raises HookError if the hooks cannot be loaded.
    """
    group = group or made_up_group()
    worker = HookWorker(path, timeout_s, sandbox)
    try:
        started = time.perf_counter()
        info = await worker.start()
        loaded = time.perf_counter()
        plan = await worker.submit(group.request_id, group.task) if info.has_submit else None
        planned = time.perf_counter()
        outcome = await worker.reward(group.siblings(), group.answers, group.question)
        scored = time.perf_counter()
        feedback = await worker.feedback(_thumbs_up(group)) if info.has_feedback else None
    finally:
        await worker.close()
    return CheckReport(
        path=path,
        group=group,
        info=info,
        plan=plan,
        outcome=outcome,
        load_s=loaded - started,
        submit_s=planned - loaded,
        reward_s=scored - planned,
        feedback=feedback,
    )


def _thumbs_up(group: RecordedGroup) -> Feedback:
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
    """Return a report as a table. The table has one row per sibling (answer) with its reward. The
    caption has the results of the other hooks, which give no rewards."""
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
            Text(str(answer.get("finish_reason"))),
            Text(_answer_text(answer)),
            "-" if rewards is None else _reward_text(rewards[index]),
            ranks[index],
            Text(_annotations_text(report.outcome, index)),
        )
    table.caption = _caption(report)
    return table


def _caption(report: CheckReport) -> Text:
    caption = Text()
    if isinstance(report.plan, HookFailure):
        caption.append(f"on_user_submit_new_requests failed: {report.plan.reason}\n", "bold red")
    else:
        caption.append(f"on_user_submit_new_requests: {_plan_text(report.plan)}\n")
    if isinstance(report.feedback, HookFailure):
        caption.append(f"on_feedback failed: {report.feedback.reason}\n", "bold red")
    elif report.feedback is not None:
        caption.append(f"on_feedback: a thumbs up counts as {report.feedback.value}\n")
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
        return (
            "fewer than two rewards are numbers, so the group would not be trained (--ledger FILE "
            "uses a group of your own)"
        )
    return None if len(set(known)) > 1 else "all rewards are equal, so nothing is learned"


def _plan_text(plan: SubmitPlan | None) -> str:
    if plan is None:
        return "not defined, N stays"
    if plan.num is not None:
        return f"{plan.num} siblings"
    if plan.overrides is None:
        return "None, N stays"
    return f"{len(plan.overrides)} siblings, {_short(orjson.dumps(plan.overrides).decode())}"


def _ranks(rewards: Sequence[float | None]) -> list[str]:
    """Return the rank of each reward as text. The highest reward has rank 1, and equal rewards have
    the same rank. The text for the reward None is "-".

    >>> _ranks([0.5, 1.0, None, 0.5])
    ['2', '1', '-', '2']
    """
    known = [reward for reward in rewards if reward is not None]
    return ["-" if own is None else str(1 + sum(other > own for other in known)) for own in rewards]


def _reward_text(reward: float | None) -> str:
    return "None" if reward is None else f"{reward:.4g}"


def _answer_text(answer: Json) -> str:
    if answer.get("content"):
        return _short(str(answer["content"]))
    calls: list[Json] = answer.get("tool_calls") or []
    functions: list[Json] = [call["function"] for call in calls]
    texts = (f"{function['name']}({function['arguments']})" for function in functions)
    return _short(", ".join(texts))


def _annotations_text(outcome: RewardOutcome, index: int) -> str:
    notes = outcome.annotations[index] if index < len(outcome.annotations) else {}
    return _short(orjson.dumps(notes).decode()) if notes else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN_CHARS else line[: MAX_SHOWN_CHARS - 1] + "…"
