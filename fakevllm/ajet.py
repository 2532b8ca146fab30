"""AgentJet's names for what its documents import, so that a script written for it changes its
imports and nothing else: `from fakevllm.ajet import AgentJetJob, SwarmClient, …`.

Names only. What a call does stands where these come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fakevllm.sdk.client import SwarmClient
from fakevllm.sdk.episode import EpisodeAccess as OpenaiBaseUrlAndApiKey
from fakevllm.sdk.executors import (
    PeriodicDrainThreadPoolExecutor,
    auto_train_with_dataset,
    run_episodes_until_all_complete,
)
from fakevllm.sdk.job import TrainJob as AgentJetJob
from fakevllm.sdk.readers import HfReader, JsonlReader, TaskReader
from fakevllm.sdk.types import SwarmServerOfflineError, WorkflowOutput
from fakevllm.sdk.types import ThrottlePolicy as SwarmThrottlePolicy
from fakevllm_adapters.protocol.swarm import Task

__all__ = [
    "AgentJetJob",
    "AjetTaskReader",
    "HuggingfaceDatRepo",
    "OpenaiBaseUrlAndApiKey",
    "PeriodicDrainThreadPoolExecutor",
    "RouterTaskReader",
    "SwarmClient",
    "SwarmServerOfflineError",
    "SwarmThrottlePolicy",
    "Task",
    "WorkflowOutput",
    "auto_train_with_dataset",
    "run_episodes_until_all_complete",
]

HF_REPO = "huggingface_dat_repo"


@dataclass(frozen=True, slots=True)
class HuggingfaceDatRepo:
    """A dataset with a column `question`."""

    dataset_path: str = "gsm8k"
    """As HfReader takes it; or a folder with a file of JSON Lines for each split, such as
    `train.jsonl`, which needs no further package."""
    dataset_name: str | None = None
    training_split: str = "train"
    validation_split: str = "validation"


@dataclass(frozen=True, slots=True)
class AjetTaskReader:
    type: str = HF_REPO
    huggingface_dat_repo: HuggingfaceDatRepo = field(default_factory=HuggingfaceDatRepo)


class RouterTaskReader:
    def __init__(self, reader_type: str, reader_config: AjetTaskReader) -> None:
        """Raises ValueError for AgentJet's other types of readers."""
        if reader_type != HF_REPO:
            raise ValueError(
                f"reader_type {reader_type!r} is not here, {HF_REPO!r} is: take a reader of "
                "fakevllm (JsonlReader, CsvReader, RandomReader), which has "
                "generate_training_tasks too"
            )
        self._repo = reader_config.huggingface_dat_repo

    def generate_training_tasks(self) -> Iterator[Task]:
        """In the dataset's order, and named alike each time. Raises ConfigError."""
        return iter(_reader(self._repo, self._repo.training_split))

    def generate_validation_tasks(self) -> Iterator[Task]:
        return iter(_reader(self._repo, self._repo.validation_split))

    def get_training_tasks(self) -> list[Task]:
        return list(self.generate_training_tasks())

    def get_validation_tasks(self) -> list[Task]:
        return list(self.generate_validation_tasks())


def _reader(repo: HuggingfaceDatRepo, split: str) -> TaskReader:
    file = Path(repo.dataset_path) / f"{split}.jsonl"
    if file.is_file():
        return JsonlReader(file)
    return HfReader(repo.dataset_path, split=split, name=repo.dataset_name)
