"""Run `fakevllm replay`: read the dataset, send the rows, and show a progress bar."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.row_requests import check_messages
from fakevllm.errors import ConfigError
from fakevllm.replay.backpressure import follow_capacity
from fakevllm.replay.progress import Progress as RowProgress
from fakevllm.replay.proxy_queries import (
    checked_url,
    first_model,
    hook_notice,
    register_tasks,
    require_lockstep,
    training_notice,
)
from fakevllm.replay.row_runner import play
from fakevllm.replay.row_senders import AppPlayer, EndpointPlayer, Player
from fakevllm.runtime.admin_client import proxy_root

CONCURRENCY = 8
MAX_SHOWN_FAILURES = 5


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    dataset: Path
    field: str
    url: str
    app_command: str | None
    model: str | None
    concurrency: int | None
    """Maximum number of rows that run at the same time. If this field is None, the number is 1 in
    lockstep and 8 otherwise."""
    limit: int | None
    epochs: int
    max_tokens: int | None
    state: Path | None
    fresh: bool
    key: str | None = None
    """API key for requests to the proxy's own routes. The rows are sent with the API keys of their
    tasks."""
    lockstep: bool = False

    @property
    def num_concurrent(self) -> int:
        """The maximum number of rows that run at the same time. With `--lockstep` the number is 1.
        Raises ConfigError if `--lockstep` is used together with a `--concurrency` other than 1."""
        if not self.lockstep:
            return self.concurrency or CONCURRENCY
        if self.concurrency not in (None, 1):
            raise ConfigError("--lockstep sends one row after another: remove --concurrency.")
        return 1

    @property
    def state_file(self) -> Path:
        return self.state or Path(".fakevllm") / f"replay-{self.dataset.stem}.jsonl"


def run_replay(settings: ReplaySettings) -> bool:
    """Send the rows of the dataset, print the most frequent failures, and return True if no row
    failed."""
    failures = asyncio.run(_replay(settings))
    console = Console()
    for reason, count in failures.most_common(MAX_SHOWN_FAILURES):
        console.print(Text(f"{count} failed:", "red"), reason, markup=False)
    return not failures


async def _replay(settings: ReplaySettings) -> Counter[str]:
    concurrency = settings.num_concurrent
    tasks = read_tasks(settings.dataset, settings.field)[: settings.limit]
    if settings.app_command is None:  # an app gets only the question
        check_messages(tasks, settings.dataset)
    url = f"{proxy_root(checked_url(settings.url))}/v1"
    settings = replace(settings, url=url)
    if settings.lockstep:
        await require_lockstep(url, settings.key)
    keys = await register_tasks(url, tasks, settings.key)
    if (notice := await training_notice(url, settings.key)) is not None:
        Console(stderr=True).print(Text(notice.text, "yellow"), f"{notice.reason}.", markup=False)
    player = await _player(settings)
    progress = RowProgress(settings.state_file, fresh=settings.fresh)
    if progress.num_done:
        Console().print(
            f"{progress.num_done} rows were finished by an earlier run ({settings.state_file}); "
            "--fresh sends all rows again",
            markup=False,
        )
    rows = progress.remaining(tasks, settings.epochs)
    failures: Counter[str] = Counter()
    try:
        async with follow_capacity(url, settings.key) as capacity:
            with _bar() as bar:
                bar_task = bar.add_task("rows", total=len(rows), failed=0)
                async for result in play(
                    rows, player, lambda task: keys[task.task_id], concurrency, capacity
                ):
                    if result.is_done:
                        progress.note(result.epoch, result.task, failed=result.failed)
                    if result.failed is not None:
                        failures[result.failed] += 1
                    bar.update(bar_task, advance=1, failed=failures.total())
    finally:
        progress.close()
    if (text := await hook_notice(url, settings.key)) is not None:
        Console(stderr=True).print(Text(text, "yellow"), soft_wrap=True)
    return failures


async def _player(settings: ReplaySettings) -> Player:
    if settings.app_command is not None:
        return AppPlayer.from_command(settings.app_command, settings.url)
    model = settings.model or await first_model(settings.url, settings.key)
    return EndpointPlayer(settings.url, model, max_tokens=settings.max_tokens)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
    )
