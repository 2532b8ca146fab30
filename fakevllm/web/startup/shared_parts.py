"""Open the parts of a proxy from which all other parts are built."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.admission.task_index import TaskIndex
from fakevllm.config.model import Config
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runtime.task_set import cancel_task
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm.swarm.model_names import ModelNames
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.tracing.tracing import Tracing, open_tracing
from fakevllm.transport.call_slots import SIBLINGS_PER_SLOT, CallSlots
from fakevllm.transport.engine_client import EngineClient
from fakevllm.transport.sibling_limit import SiblingLimit
from fakevllm.web.startup.datasets import dataset_rows, held_out_rows
from fakevllm.web.startup.hooks import start_hooks
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_runtime.open_files import FileBudget


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts of a proxy from which all other parts are built."""

    config: Config
    held_out: HeldOutRows
    ledger: Ledger
    redaction: RedactionInUse
    """The redaction of what the ledger and the log store."""
    tasks: TaskIndex
    tracing: Tracing | None
    hooks: HookVersions | None
    upstream: EngineClient
    slots: CallSlots
    sibling_limit: SiblingLimit
    link: SwarmLink
    model_names: ModelNames
    metrics: Metrics


async def open_shared_parts(
    config: Config, files: FileBudget, stack: contextlib.AsyncExitStack
) -> SharedParts:
    """Read the datasets, open the ledger, and start the hooks and the connection to the server.

    `files` limits the number of calls to the server. Raise UserError for mistakes that the user can
    fix.
    """
    rows = dataset_rows(config.dataset)
    held_out = held_out_rows(config, rows)
    stack.callback(LedgerLock(config.ledger_file).close)
    redaction = RedactionInUse(config.job.privacy_or_default)
    ledger = Ledger.open(config.ledger_file, redaction=redaction)
    stack.callback(ledger.close)
    tasks = _task_index(config, ledger, rows)
    tracing = open_tracing(
        config.tracing, os.environ, ledger.redactor, config.swarm.url, config.fallback.url
    )
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    hooks = await start_hooks(config, stack, redaction)
    upstream = EngineClient(config.swarm.url, config.swarm.key)
    stack.push_async_callback(upstream.close)
    slots = CallSlots(min(config.limits.num_calls, files.num_calls))
    sibling_limit = _sibling_limit(config, slots)
    link = _start_link(config, ledger, sibling_limit, redaction, stack)
    return SharedParts(
        config=config,
        held_out=held_out,
        ledger=ledger,
        redaction=redaction,
        tasks=tasks,
        tracing=tracing,
        hooks=hooks,
        upstream=upstream,
        slots=slots,
        sibling_limit=sibling_limit,
        link=link,
        model_names=ModelNames(config.models.aliases, link),
        metrics=Metrics(),
    )


def _task_index(config: Config, ledger: Ledger, rows: list[Task]) -> TaskIndex:
    """Return the index of the rows of the dataset and of the tasks that clients have sent."""
    keys = config.keys()
    with ledger.reading():
        tasks = TaskIndex(ledger.task_secret(), keys)
        tasks.add_dataset(rows)
        for stored in ledger.tasks():
            tasks.add([stored.task], stored.owner)
    return tasks


def _sibling_limit(config: Config, slots: CallSlots) -> SiblingLimit:
    most = SIBLINGS_PER_SLOT * slots.num_slots
    return SiblingLimit(min(config.serve.max_siblings_in_flight or most, most))


def _start_link(
    config: Config,
    ledger: Ledger,
    sibling_limit: SiblingLimit,
    redaction: RedactionInUse,
    stack: contextlib.AsyncExitStack,
) -> SwarmLink:
    load_probe = LoadProbe(lambda: sibling_limit.in_flight > 0)
    link = SwarmLink(config.swarm.url, config.swarm.key, config.job, ledger, load_probe, redaction)
    stack.push_async_callback(link.close)
    stack.push_async_callback(cancel_task, asyncio.create_task(link.run()))
    return link
