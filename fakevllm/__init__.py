"""The proxy and the SDK of fakevllm. The proxy forwards an app's requests to a model, and trains
the model on this traffic. The SDK is for agents that are written for fakevllm. An agent claims
episodes from a swarm server. An episode is one run of an agent on one task. The swarm server is the
process that samples and trains the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakevllm.sdk.async_client import AsyncSwarmClient
    from fakevllm.sdk.client import SwarmClient
    from fakevllm.sdk.episode import AsyncEpisode, Episode, EpisodeAccess
    from fakevllm.sdk.episode_executors import (
        PeriodicDrainThreadPoolExecutor,
        auto_train_with_dataset,
        run_episodes_until_all_complete,
    )
    from fakevllm.sdk.job import TrainJob
    from fakevllm.sdk.multi_server import episodes_together, start_engines
    from fakevllm.sdk.task_readers import (
        CsvReader,
        HfReader,
        JsonlReader,
        RandomReader,
        RouterReader,
        TaskReader,
    )
    from fakevllm.sdk.types import (
        EpisodeLost,
        ServerUnreachable,
        SwarmError,
        SwarmServerOfflineError,
        ThrottlePolicy,
        WorkflowOutput,
    )
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
    "AsyncEpisode": "fakevllm.sdk.episode",
    "AsyncSwarmClient": "fakevllm.sdk.async_client",
    "CsvReader": "fakevllm.sdk.task_readers",
    "Episode": "fakevllm.sdk.episode",
    "EpisodeAccess": "fakevllm.sdk.episode",
    "EpisodeLost": "fakevllm.sdk.types",
    "HfReader": "fakevllm.sdk.task_readers",
    "JsonlReader": "fakevllm.sdk.task_readers",
    "PeriodicDrainThreadPoolExecutor": "fakevllm.sdk.episode_executors",
    "RandomReader": "fakevllm.sdk.task_readers",
    "RouterReader": "fakevllm.sdk.task_readers",
    "ServerUnreachable": "fakevllm.sdk.types",
    "SwarmClient": "fakevllm.sdk.client",
    "SwarmError": "fakevllm.sdk.types",
    "SwarmServerOfflineError": "fakevllm.sdk.types",
    "Task": "fakevllm_adapters.protocol.swarm",
    "TaskReader": "fakevllm.sdk.task_readers",
    "ThrottlePolicy": "fakevllm.sdk.types",
    "TrainJob": "fakevllm.sdk.job",
    "WorkflowOutput": "fakevllm.sdk.types",
    "auto_train_with_dataset": "fakevllm.sdk.episode_executors",
    "episodes_together": "fakevllm.sdk.multi_server",
    "run_episodes_until_all_complete": "fakevllm.sdk.episode_executors",
    "start_engines": "fakevllm.sdk.multi_server",
}
"""Maps each exported name to the module that defines it."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Return the exported class or function `name`. Python calls this function when a name of the
    package is first used. Only then is the module that defines the name imported.

    The command line imports this package at every start, and the start must be fast. The package
    therefore imports each of its modules only when a name from the module is used.
    """
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
