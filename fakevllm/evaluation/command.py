"""Run `fakevllm eval`: check the rows, let the proxy sample and score them, and show results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.row_requests import check_requests
from fakevllm.errors import ConfigError, UserError
from fakevllm.evaluation.messages import (
    HOW_TO_SCORE,
    MAX_VERSIONS,
    NO_HOOKS,
    RowReply,
    RowRequest,
    trained_text,
)
from fakevllm.evaluation.proxy_requests import ProxyRequests
from fakevllm.evaluation.report import EvalReport, RowResult
from fakevllm.evaluation.results import UNIT_RANGE
from fakevllm.evaluation.table import render
from fakevllm.replay.proxy_queries import checked_url
from fakevllm.runtime.bounded_tasks import run_bounded
from fakevllm.runtime.json_file import write_json
from fakevllm.runtime.plurals import counted
from fakevllm.runtime.progress_bar import progress_bar
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import Task

NUM_SAMPLES = 4
CONCURRENCY = 4
"""Default number of rows that are evaluated at the same time. The number is small, because each row
has several samples, and the proxy's apps need capacity too."""
NUM_UNSCORED = 10
"""The evaluation ends early if none of this number of first rows gets a reward."""
HOOKS_CHANGED = (
    "The hooks of the proxy changed while the rows were evaluated, so their rewards cannot be "
    "compared: run the command again."
)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    dataset: Path
    text_field: str
    url: str
    key: str | None = None
    num_samples: int = NUM_SAMPLES
    json_file: Path | None = None
    fail_below: float | None = None
    limit: int | None = None
    concurrency: int = CONCURRENCY
    max_tokens: int | None = None
    versions: tuple[int, ...] = ()
    """Versions of the weights to evaluate. If the tuple is empty, the served weights are evaluated.
    """
    rewards: RewardRange = UNIT_RANGE
    solved_at: float | None = None
    """Minimum reward with which a row counts as solved; None means the highest possible reward."""
    eval_id: str = field(default_factory=new_id)


def run_eval(settings: EvalSettings, console: Console | None = None) -> bool:
    """Evaluate the rows, print the table, and write the JSON file. Return True if each version has
    a mean reward of at least `settings.fail_below`, or if this limit is not set. Otherwise return
    False.

    Raises UserError for mistakes that the user can fix.
    """
    report = asyncio.run(_evaluate(settings))
    (console or Console()).print(render(report))
    if settings.json_file is not None:
        write_json(settings.json_file, report.as_json())
    limit = settings.fail_below
    means = [summary.mean for summary in report.summaries]
    return limit is None or all(mean is not None and mean.mean >= limit for mean in means)


async def _evaluate(settings: EvalSettings) -> EvalReport:
    tasks = read_tasks(settings.dataset, settings.text_field)[: settings.limit]
    if not tasks:
        raise ConfigError(
            f"The dataset {settings.dataset} has no rows: write one JSON object per line."
        )
    check_requests(tasks, settings.dataset)
    versions = list(settings.versions)
    if len(versions) > MAX_VERSIONS or len(set(versions)) < len(versions):
        raise ConfigError(f"--version takes up to {MAX_VERSIONS} different versions.")
    async with ProxyRequests(checked_url(settings.url), settings.key) as proxy:
        try:
            with Console(stderr=True).status("checking the rows, and loading versions"):
                check = await proxy.check([task.main_query for task in tasks], versions)
            if not check.has_hooks:
                raise ConfigError(NO_HOOKS)
            if check.refusal is not None:
                raise ConfigError(check.refusal)
            if check.trained:
                trained = [tasks[position] for position in check.trained]
                raise ConfigError(_overlap(settings, trained))
            rows = await _run_rows(settings, proxy, tasks)
        finally:
            if versions:
                await proxy.end(versions)
    return EvalReport(
        settings.dataset.name,
        settings.eval_id,
        settings.num_samples,
        settings.rewards,
        settings.solved_at,
        rows,
    )


def _overlap(settings: EvalSettings, tasks: Sequence[Task]) -> str:
    trained = trained_text(settings.dataset, [task.main_query for task in tasks])
    return (
        f"{trained}: evaluate other rows, and name them as release.eval_dataset before you train."
    )


async def _run_rows(
    settings: EvalSettings, proxy: ProxyRequests, tasks: Sequence[Task]
) -> list[RowResult]:
    results: list[RowResult] = []
    reasons: Counter[str] = Counter()
    hooks: set[str] = set()
    attempts = (_evaluate_row(settings, proxy, task) for task in tasks)
    with progress_bar() as bar:
        bar_task = bar.add_task("rows", total=len(tasks))
        # The generator is closed, so that no row loads a version again after the evaluation's end.
        async with aclosing(run_bounded(attempts, settings.concurrency)) as ended:
            async for result in ended:
                results.append(result)
                hooks |= result.hook_hashes
                if len(hooks) > 1:
                    raise UserError(HOOKS_CHANGED)
                bar.update(bar_task, advance=1)
                if not result.has_rewards:
                    reasons[result.reason] += 1
                is_last = len(results) == len(tasks)
                if reasons.total() == len(results) and (is_last or len(results) >= NUM_UNSCORED):
                    reason, num = reasons.most_common(1)[0]
                    raise UserError(_nothing_scored(results, f"{counted(num, 'time')}: {reason}"))
    # Rows end in any order.
    order = {task.task_id: position for position, task in enumerate(tasks)}
    return sorted(results, key=lambda result: order[result.task.task_id])


def _nothing_scored(results: Sequence[RowResult], cause: str) -> str:
    num_rows = counted(len(results), "row")
    if not any(result.has_answers for result in results):
        return f"The engine answered none of {num_rows} ({cause}): see its log."
    return f"The hook scored none of {num_rows} ({cause}): {HOW_TO_SCORE}."


async def _evaluate_row(settings: EvalSettings, proxy: ProxyRequests, task: Task) -> RowResult:
    """Let the proxy evaluate one row with each version, one after another."""
    replies: list[RowReply] = []
    for version in settings.versions or (None,):
        request = RowRequest(
            eval_id=settings.eval_id,
            task=task,
            num_samples=settings.num_samples,
            max_tokens=settings.max_tokens,
            version=version,
        )
        replies.append(await proxy.evaluate(request))
    return RowResult(task, replies)
