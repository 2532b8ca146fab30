"""The proxy's parts, made together and closed in reverse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fakevllm.config import Config
from fakevllm.hooks.worker import HookWorker
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runner import Runner
from fakevllm.settling import Settling
from fakevllm.swarm.link import SwarmLink
from fakevllm.tasks import TaskIndex, read_tasks
from fakevllm.upstream import Upstream
from fakevllm_adapters.errors import unavailable


@dataclass(frozen=True, slots=True)
class Proxy:
    config: Config
    ledger: Ledger
    upstream: Upstream
    link: SwarmLink
    tasks: TaskIndex
    runner: Runner

    def rename(self, body: dict[str, Any]) -> bool:
        """Puts the served model's name for an alias. Returns whether the body changed. Raises
        WireError (503) while that name is not known."""
        asked, served = body.get("model"), self.link.model
        aliases = self.config.models.aliases
        if not isinstance(asked, str) or asked == served:
            return False
        if asked not in aliases and "*" not in aliases:
            return False
        if served is None:
            raise unavailable("The model server has not told yet which model it serves.")
        body["model"] = served
        return True

    @property
    def num_siblings(self) -> int:
        """Bodies that are sampled of one request, as configured."""
        return self.config.job.num_repeat if self.config.hooks.path is not None else 1

    @property
    def metrics(self) -> Metrics:
        return self.runner.metrics


@contextlib.asynccontextmanager
async def open_proxy(config: Config) -> AsyncGenerator[Proxy]:
    """Raises UserError for what the user can mend."""
    async with contextlib.AsyncExitStack() as stack:
        dataset = config.dataset
        rows = read_tasks(dataset.file, dataset.field) if dataset.file is not None else []
        stack.callback(LedgerLock(config.ledger_file).close)
        ledger = Ledger.open(config.ledger_file)
        stack.callback(ledger.close)
        # Who may guess a task's id must not get past a proxy that asks for keys.
        keys = config.keys()
        tasks = TaskIndex(ledger.task_secret(), takes_unsigned=lambda: not keys)
        tasks.add(rows, by_text=True)
        tasks.add(ledger.tasks())
        hooks = await _start_hooks(config, stack)
        upstream = Upstream(config.swarm.url, config.swarm.key)
        stack.push_async_callback(upstream.close)
        link = SwarmLink(config.swarm.url, config.swarm.key, config.job, ledger)
        stack.push_async_callback(link.close)
        following = asyncio.create_task(link.run())
        stack.push_async_callback(_cancel, following)
        settling = Settling(ledger, link)
        stack.push_async_callback(settling.close)
        settling.resend(ledger.scored_groups())
        runner = Runner(config, upstream, hooks, ledger, settling)
        stack.push_async_callback(runner.close)
        yield Proxy(config, ledger, upstream, link, tasks, runner)


async def _start_hooks(config: Config, stack: contextlib.AsyncExitStack) -> HookWorker | None:
    if config.hooks.path is None:
        return None
    worker = HookWorker(config.hooks.path, config.hooks.timeout_s)
    stack.push_async_callback(worker.close)
    await worker.start()
    return worker


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
