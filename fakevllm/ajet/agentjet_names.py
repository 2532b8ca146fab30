"""AgentJet's names for classes and functions of the SDK, and AgentJet's task readers.

In a script that was written for AgentJet, only the imports need to change: `from fakevllm.ajet
import AgentJetJob, SwarmClient, …`. The classes and functions are documented in `fakevllm.sdk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fakevllm.sdk.client import SwarmClient
from fakevllm.sdk.episode import EpisodeAccess as OpenaiBaseUrlAndApiKey
from fakevllm.sdk.episode_executors import (
    PeriodicDrainThreadPoolExecutor,
    auto_train_with_dataset,
    run_episodes_until_all_complete,
)
from fakevllm.sdk.job import TrainJob as AgentJetJob
from fakevllm.sdk.task_readers import HfReader, JsonlReader, TaskReader
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
    """The settings of a Hugging Face dataset, which must have a column `question`."""

    dataset_path: str = "gsm8k"
    """A name or folder that HfReader accepts, or a folder with one JSON Lines file per split, such
    as `train.jsonl`. Reading JSON Lines needs no further package."""
    dataset_name: str | None = None
    training_split: str = "train"
    validation_split: str = "validation"


@dataclass(frozen=True, slots=True)
class AjetTaskReader:
    """The settings of a RouterTaskReader, which reads the tasks of a dataset."""

    type: str = HF_REPO
    huggingface_dat_repo: HuggingfaceDatRepo = field(default_factory=HuggingfaceDatRepo)


class RouterTaskReader:
    """Reader of the training and validation tasks of a dataset."""

    def __init__(self, reader_type: str, reader_config: AjetTaskReader) -> None:
        """Create the reader. Raises ValueError for a reader type that is not supported."""
        if reader_type != HF_REPO:
            raise ValueError(
                f"reader_type {reader_type!r} is not supported: use {HF_REPO!r}, or a reader of "
                "fakevllm (JsonlReader, CsvReader, RandomReader), which also has "
                "generate_training_tasks"
            )
        self._repo = reader_config.huggingface_dat_repo

    def generate_training_tasks(self) -> Iterator[Task]:
        """Return an iterator over the training tasks, in the dataset's order. Each call of this
        method yields the same task ids.

        Raises ConfigError if the dataset cannot be read.
        """
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
