"""Start the objects that reload the user's hooks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from fakevllm.hooks.hook_file_watch import HookFileWatch
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.rescoring.hook_reloader import HookReloader
from fakevllm.rescoring.hook_trial import HookTrial
from fakevllm.runtime.task_set import cancel_task
from fakevllm.web.startup.hooks import new_worker
from fakevllm.web.startup.shared_parts import SharedParts
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class RunningHooks:
    """The user's hooks, and the objects that reload them."""

    versions: HookVersions
    reloader: HookReloader
    files: HookFileWatch
    """Object that notices changes of the hook files."""


def open_reloads(
    parts: SharedParts, versions: HookVersions, stack: contextlib.AsyncExitStack
) -> RunningHooks:
    """Start to watch the hook files, and return the objects that reload the hooks."""
    config, ledger = parts.config, parts.ledger
    assert config.hooks.path is not None, "only a proxy with hooks reloads them"

    def find_task(task_id: str) -> Task | None:
        return parts.tasks.by_id(task_id) or ledger.task(task_id)

    limits = config.hooks.reload
    trial = HookTrial(ledger, config.ledger_file, find_task, limits, config.reward.failure_floor)
    reloader = HookReloader(
        versions, lambda: new_worker(config, parts.redaction), trial, limits.max_s
    )
    stack.push_async_callback(reloader.close)
    files = HookFileWatch(
        config.hooks.path,
        lambda: versions.info.content_hash,
        reloader.reload_edited if config.hooks.watch else None,
    )
    stack.push_async_callback(cancel_task, asyncio.create_task(files.run()))
    return RunningHooks(versions, reloader, files)
