"""`fakevllm replay`: settings in, progress bar out."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fakevllm.admission.task_index import read_tasks
from fakevllm.errors import ConfigError
from fakevllm.replay.pace import room_at
from fakevllm.replay.play import play
from fakevllm.replay.players import AppPlayer, EndpointPlayer, Player
from fakevllm.replay.progress import Progress as RowProgress
from fakevllm.replay.proxy import (
    checked_url,
    first_model,
    need_lockstep,
    register,
    why_untrained,
)
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
    """Rows at a time; None: as many as become the mode."""
    limit: int | None
    epochs: int
    max_tokens: int | None
    state: Path | None
    fresh: bool
    key: str | None = None
    """Ours at the proxy, for what is asked before and beside the rows; these have task keys."""
    lockstep: bool = False

    @property
    def num_at_a_time(self) -> int:
        """Raises ConfigError for several in lockstep."""
        if not self.lockstep:
            return self.concurrency or CONCURRENCY
        if self.concurrency not in (None, 1):
            raise ConfigError("--lockstep plays row after row: take --concurrency out.")
        return 1

    @property
    def state_file(self) -> Path:
        return self.state or Path(".fakevllm") / f"replay-{self.dataset.stem}.jsonl"


def run_replay(settings: ReplaySettings) -> bool:
    """Whether every row was answered."""
    failures = asyncio.run(_replay(settings))
    console = Console()
    for reason, count in failures.most_common(MAX_SHOWN_FAILURES):
        console.print(f"[red]{count} failed:[/red] {reason}")
    return not failures


async def _replay(settings: ReplaySettings) -> Counter[str]:
    concurrency = settings.num_at_a_time
    tasks = read_tasks(settings.dataset, settings.field)[: settings.limit]
    url = f"{proxy_root(checked_url(settings.url))}/v1"
    settings = replace(settings, url=url)
    if settings.lockstep:
        await need_lockstep(url, settings.key)
    keys = await register(url, tasks, settings.key)
    if (why := await why_untrained(url, settings.key)) is not None:
        Console(stderr=True).print(f"[yellow]The proxy trains nothing of this:[/yellow] {why}.")
    player = await _player(settings)
    progress = RowProgress(settings.state_file, fresh=settings.fresh)
    if progress.num_done:
        Console().print(
            f"{progress.num_done} rows were done before ({settings.state_file}); "
            "--fresh plays all again"
        )
    rows = progress.remaining(tasks, settings.epochs)
    failures: Counter[str] = Counter()
    try:
        async with room_at(url, settings.key) as room:
            with _bar() as bar:
                shown = bar.add_task("rows", total=len(rows), failed=0)
                async for end in play(
                    rows, player, lambda task: keys[task.task_id], concurrency, room
                ):
                    if end.is_done:
                        progress.note(end.epoch, end.task, failed=end.failed)
                    if end.failed is not None:
                        failures[end.failed] += 1
                    bar.update(shown, advance=1, failed=failures.total())
    finally:
        progress.close()
    return failures


async def _player(settings: ReplaySettings) -> Player:
    if settings.app_command is not None:
        return AppPlayer.of(settings.app_command, settings.url)
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
