"""The proxy: serves the app, fans requests out, scores the answers, keeps the ledger; and the SDK
for agents that claim their episodes themselves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakevllm.client.access import EpisodeAccess
    from fakevllm.client.async_client import AsyncSwarmClient
    from fakevllm.client.episode import AsyncEpisode, Episode
    from fakevllm.client.errors import (
        EpisodeLost,
        ServerUnreachable,
        SwarmError,
        SwarmServerOfflineError,
    )
    from fakevllm.client.executors import (
        PeriodicDrainThreadPoolExecutor,
        auto_train_with_dataset,
        run_episodes_until_all_complete,
    )
    from fakevllm.client.given import ThrottlePolicy, WorkflowOutput
    from fakevllm.client.job import TrainJob
    from fakevllm.client.readers import (
        CsvReader,
        HfReader,
        JsonlReader,
        RandomReader,
        RouterReader,
        TaskReader,
    )
    from fakevllm.client.swarm_client import SwarmClient
    from fakevllm.client.together import episodes_together, start_engines
    from fakevllm_adapters.protocol.swarm import Task

__all__ = [
    "AsyncEpisode",
    "AsyncSwarmClient",
    "CsvReader",
    "Episode",
    "EpisodeAccess",
    "EpisodeLost",
    "HfReader",
    "JsonlReader",
    "PeriodicDrainThreadPoolExecutor",
    "RandomReader",
    "RouterReader",
    "ServerUnreachable",
    "SwarmClient",
    "SwarmError",
    "SwarmServerOfflineError",
    "Task",
    "TaskReader",
    "ThrottlePolicy",
    "TrainJob",
    "WorkflowOutput",
    "auto_train_with_dataset",
    "episodes_together",
    "run_episodes_until_all_complete",
    "start_engines",
]

_HOMES = {
    "fakevllm.client.access": ("EpisodeAccess",),
    "fakevllm.client.async_client": ("AsyncSwarmClient",),
    "fakevllm.client.episode": ("AsyncEpisode", "Episode"),
    "fakevllm.client.errors": (
        "EpisodeLost",
        "ServerUnreachable",
        "SwarmError",
        "SwarmServerOfflineError",
    ),
    "fakevllm.client.executors": (
        "PeriodicDrainThreadPoolExecutor",
        "auto_train_with_dataset",
        "run_episodes_until_all_complete",
    ),
    "fakevllm.client.given": ("ThrottlePolicy", "WorkflowOutput"),
    "fakevllm.client.job": ("TrainJob",),
    "fakevllm.client.readers": (
        "CsvReader",
        "HfReader",
        "JsonlReader",
        "RandomReader",
        "RouterReader",
        "TaskReader",
    ),
    "fakevllm.client.swarm_client": ("SwarmClient",),
    "fakevllm.client.together": ("episodes_together", "start_engines"),
    "fakevllm_adapters.protocol.swarm": ("Task",),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Loaded when asked for: the command line imports this package before all else."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
