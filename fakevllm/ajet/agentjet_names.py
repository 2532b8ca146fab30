"""AgentJet's names for classes and functions of the SDK.

In a script that was written for AgentJet, only the imports need to change, to `from fakevllm.ajet
import AgentJetJob, SwarmClient, …`. Most of these names are aliases of classes and functions of
`fakevllm.sdk`, and are documented there. The other names exist only for AgentJet scripts. They are
defined and documented in this folder.
"""

from __future__ import annotations

from fakevllm.ajet.router_task_reader import (
    AjetTaskReader,
    HuggingfaceDatRepo,
    JsonlDatasetFile,
    JsonlTrainingFp,
    RouterTaskReader,
)
from fakevllm.ajet.workflow_task import WorkflowTask
from fakevllm.sdk.client import SwarmClient
from fakevllm.sdk.episode import EpisodeAccess as OpenaiBaseUrlAndApiKey
from fakevllm.sdk.episode_executors import (
    PeriodicDrainThreadPoolExecutor,
    auto_train_with_dataset,
    run_episodes_until_all_complete,
)
from fakevllm.sdk.job import TrainJob as AgentJetJob
from fakevllm.sdk.limited_executors import (
    BoundedThreadPoolExecutor,
    TaskCountLimitedThreadPoolExecutor,
)
from fakevllm.sdk.types import SwarmServerOfflineError, WorkflowOutput
from fakevllm.sdk.types import ThrottlePolicy as SwarmThrottlePolicy
from fakevllm_adapters.protocol.swarm import Task

__all__ = [
    "AgentJetJob",
    "AjetTaskReader",
    "BoundedThreadPoolExecutor",
    "HuggingfaceDatRepo",
    "JsonlDatasetFile",
    "JsonlTrainingFp",
    "OpenaiBaseUrlAndApiKey",
    "PeriodicDrainThreadPoolExecutor",
    "RouterTaskReader",
    "SwarmClient",
    "SwarmServerOfflineError",
    "SwarmThrottlePolicy",
    "Task",
    "TaskCountLimitedThreadPoolExecutor",
    "WorkflowOutput",
    "WorkflowTask",
    "auto_train_with_dataset",
    "run_episodes_until_all_complete",
]
