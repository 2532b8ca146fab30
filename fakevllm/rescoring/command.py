"""Run `fakevllm rescore`: select groups, run the hooks over them, and show the comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fakevllm.errors import ConfigError, UserError
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.ledger.broken_rows import BrokenGroup
from fakevllm.ledger.offline_copy import offline_ledger
from fakevllm.ledger.selection import GroupSelection, SelectedGroups
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.logged_groups import MIN_ANSWERS
from fakevllm.rescoring.rescorer import Rescorer, Scorer
from fakevllm.rescoring.table import Rescored, render
from fakevllm.runtime.json_file import write_json
from fakevllm.runtime.progress_bar import progress_bar
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import Task

CONCURRENCY = 4
"""Default number of groups that are scored at a time."""


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
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    """What is redacted in the annotations and reasons that the command stores, and in what the
    hooks print."""


def run_rescore(settings: RescoreSettings, console: Console | None = None) -> bool:
    """Score the groups, print the comparison, and write the JSON file. Return False if the hooks
    scored no group.

    Raises UserError for mistakes that the user can fix.
    """
    if settings.json_file is not None and not settings.json_file.absolute().parent.is_dir():
        raise ConfigError(f"The folder of {settings.json_file} does not exist: create it.")
    file = offline_ledger(settings.ledger)
    groups = GroupSelection(file, settings.where, settings.last, MIN_ANSWERS).find()
    if not groups.count:
        raise UserError(
            f"No group in {file} can be scored: a group needs {MIN_ANSWERS} answers of the model, "
            "and must meet the condition of --where."
        )
    rescored = Rescored(file)
    try:
        asyncio.run(_rescore(settings, rescored, groups))
    finally:
        # Also after an error: the rewards may have cost money.
        if rescored.comparison.num_groups:
            title = f"{settings.hooks} (hash {rescored.hook_hash})"
            (console or Console()).print(render(rescored, title))
    if settings.json_file is not None:
        write_json(settings.json_file, _as_json(settings, rescored))
    return rescored.comparison.num_groups > rescored.comparison.failures.total()


async def _rescore(settings: RescoreSettings, rescored: Rescored, groups: SelectedGroups) -> None:
    redaction = RedactionInUse(settings.privacy)
    scorer = Scorer(
        settings.hooks,
        settings.timeout_s,
        settings.sandbox,
        settings.concurrency,
        settings.failure_floor,
        settings.tasks,
        redaction,
    )
    ledger = Ledger.open(rescored.ledger, redaction=redaction)
    try:
        async with Rescorer(ledger, scorer, again=settings.again) as rescorer:
            rescored.hook_hash = rescorer.hook_hash
            with progress_bar() as bar:
                bar_task = bar.add_task("groups", total=groups.count)
                async for result in rescorer.score(groups.ids()):
                    bar.update(bar_task, advance=1)
                    if isinstance(result, BrokenGroup):
                        rescored.broken.append(result)
                    else:
                        rescored.comparison.add(result)
            await rescorer.flush()
    finally:
        ledger.close()


def _as_json(settings: RescoreSettings, rescored: Rescored) -> dict[str, Any]:
    return {
        "ledger": str(rescored.ledger),
        "hooks": str(settings.hooks),
        "hook_hash": rescored.hook_hash,
        **rescored.comparison.as_json(),
        "unreadable": {one.group_id: one.error for one in rescored.broken},
    }
