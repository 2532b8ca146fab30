"""Run `fakevllm rescore`: select groups, run the hooks over them, and show the comparison."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fakevllm.errors import ConfigError, UserError
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.ledger.offline_copy import current_schema
from fakevllm.ledger.selection import GroupSelection
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.logged_groups import MIN_ANSWERS
from fakevllm.rescoring.rescorer import Rescorer, Scorer
from fakevllm.rescoring.table import Rescored, render
from fakevllm_adapters.protocol.swarm import Task

MAX_PROCESSES = 4
CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class RescoreSettings:
    ledger: Path
    hooks: Path
    timeout_s: float
    where: str | None = None
    """SQL expression over the columns of the view `groups`; None selects all groups."""
    last: int | None = None
    """Number of the newest groups to score; None means all."""
    concurrency: int = CONCURRENCY
    """Number of groups that are scored at a time."""
    again: bool = False
    failure_floor: float | None = None
    sandbox: HookSandbox = DEFAULT_SANDBOX
    json_file: Path | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    """Rows of the dataset file by the ids of their tasks."""


def run_rescore(settings: RescoreSettings, console: Console | None = None) -> bool:
    """Score the groups, print the comparison, and write the JSON file. Return False if the hooks
    scored no group.

    Raises UserError for mistakes that the user can fix.
    """
    if not settings.ledger.is_file():
        raise UserError(f"There is no ledger {settings.ledger}: name another with --ledger.")
    if settings.json_file is not None and not settings.json_file.absolute().parent.is_dir():
        raise ConfigError(f"The folder of {settings.json_file} does not exist: create it.")
    messages = Console(stderr=True)
    file, note = current_schema(settings.ledger)
    if note is not None:
        messages.print(note, markup=False, highlight=False, soft_wrap=True)
    selection = GroupSelection(file, settings.where, settings.last, MIN_ANSWERS)
    group_ids = list(selection.find().ids())
    if not group_ids:
        raise UserError(
            f"No group in {file} can be scored: a group needs {MIN_ANSWERS} answers of the model, "
            "and must meet the condition of --where."
        )
    rescored = Rescored(file)
    try:
        asyncio.run(_rescore(settings, rescored, group_ids, messages))
    finally:
        # Also after an error: the rewards may have cost money.
        if rescored.comparison.num_groups:
            title = f"{settings.hooks} (hash {rescored.hook_hash})"
            (console or Console()).print(render(rescored, title))
    if settings.json_file is not None:
        _write(settings.json_file, settings, rescored)
    return rescored.comparison.num_groups > rescored.comparison.failures.total()


async def _rescore(
    settings: RescoreSettings, rescored: Rescored, group_ids: Sequence[str], messages: Console
) -> None:
    scorer = Scorer(
        settings.hooks,
        settings.timeout_s,
        settings.sandbox,
        min(settings.concurrency, MAX_PROCESSES, os.cpu_count() or 1),
        settings.concurrency,
        settings.failure_floor,
        settings.tasks,
    )
    ledger = Ledger.open(rescored.ledger)
    try:
        async with Rescorer(ledger, scorer, again=settings.again) as rescorer:
            rescored.hook_hash = rescorer.hook_hash
            with _bar(messages) as bar:
                bar_task = bar.add_task("groups", total=len(group_ids))
                async for result in rescorer.score(group_ids):
                    bar.update(bar_task, advance=1)
                    rescored.num_without_task = rescorer.num_without_task
                    if isinstance(result, BrokenGroup):
                        rescored.broken.append(result)
                    else:
                        rescored.comparison.add(result)
            await rescorer.flush()
    finally:
        ledger.close()


def _write(file: Path, settings: RescoreSettings, rescored: Rescored) -> None:
    report = {
        "ledger": str(rescored.ledger),
        "hooks": str(settings.hooks),
        "hook_hash": rescored.hook_hash,
        "num_without_task": rescored.num_without_task,
        **rescored.comparison.as_json(),
        "unreadable": {one.group_id: one.error for one in rescored.broken},
    }
    try:
        file.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): set --json.") from None


def _bar(messages: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
    )
