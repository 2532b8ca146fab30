"""RouterTaskReader, AgentJet's class for reading tasks. Its argument `reader_type` selects the
source of the tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fakevllm.ajet.jsonl_tasks import read_jsonl_tasks
from fakevllm.errors import ConfigError
from fakevllm.sdk.task_readers import HfReader, JsonlReader
from fakevllm_adapters.protocol.swarm import Task

HF_REPO, JSONL_FILE, RANDOM_DUMMY = "huggingface_dat_repo", "jsonl_dataset_file", "random_dummy"
NOT_SUPPORTED = ("env_service", "tracing", "data_generation")
"""Reader types of AgentJet that fakevllm does not support."""
NUM_DUMMY_TASKS = 1000
_DUMMY_SEED = "random_dummy"
"""Random seed that determines the order of the dummy tasks, so that the order is the same on all
machines."""

Split = Literal["training", "validation"]


@dataclass(slots=True)  # not frozen, because scripts for AgentJet may set attributes
class HuggingfaceDatRepo:
    """The settings of a Hugging Face dataset. The dataset must have a column `question`."""

    dataset_path: str = "gsm8k"
    """Source of the dataset. Three kinds of sources are possible:

    * the name of a dataset on the Hugging Face hub
    * a folder that HfReader can read
    * a folder with one JSON Lines file per split, such as `train.jsonl`; only this kind of source
      needs no additional package
    """
    dataset_name: str | None = None
    training_split: str = "train"
    validation_split: str = "validation"


@dataclass(slots=True)
class JsonlTrainingFp:
    """The path of a JSON Lines file of tasks, for training or for validation."""

    file_path: str = ""


@dataclass(slots=True)
class JsonlDatasetFile:
    """The JSON Lines files for training and for validation."""

    training: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)
    validation: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)


@dataclass(slots=True)
class AjetTaskReader:
    """The settings of a RouterTaskReader."""

    type: str = HF_REPO
    """Not used, because the argument `reader_type` of RouterTaskReader selects the source."""
    huggingface_dat_repo: HuggingfaceDatRepo = field(default_factory=HuggingfaceDatRepo)
    jsonl_dataset_file: JsonlDatasetFile = field(default_factory=JsonlDatasetFile)


class RouterTaskReader:
    """A reader of the training and validation tasks of a dataset.

    `reader_type` is one of these sources:

    * `random_dummy`: 1000 tasks that contain only a number, for agents that generate their own
      problems. The tasks are shuffled with a fixed seed.
    * `jsonl_dataset_file`: the files in `reader_config.jsonl_dataset_file`.
    * `huggingface_dat_repo`: the dataset in `reader_config.huggingface_dat_repo`.
    """

    def __init__(self, reader_type: str, reader_config: AjetTaskReader) -> None:
        """Create the reader. Raises ValueError for a reader type that is not supported."""
        if reader_type not in _READ_FUNCTIONS:
            problem = "is not supported" if reader_type in NOT_SUPPORTED else "is not known"
            raise ValueError(
                f"reader_type {reader_type!r} {problem}: use {', '.join(sorted(_READ_FUNCTIONS))}, "
                "or a reader of fakevllm (JsonlReader, CsvReader, RandomReader), which also has "
                "generate_training_tasks"
            )
        self._read = _READ_FUNCTIONS[reader_type]
        self._config = reader_config

    def generate_training_tasks(self) -> Iterator[Task]:
        """Return an iterator over the training tasks in the source's own order. Every call returns
        the same tasks with the same ids.

        Raises ConfigError if the dataset cannot be read.
        """
        return iter(self._read(self._config, "training"))

    def generate_validation_tasks(self) -> Iterator[Task]:
        """Return an iterator over the validation tasks in the source's own order.

        Raises ConfigError if the dataset cannot be read.
        """
        return iter(self._read(self._config, "validation"))

    def get_training_tasks(self) -> list[Task]:
        """Return the training tasks in a new random order. For a reproducible order, call
        `random.seed` first."""
        return _shuffled(self.generate_training_tasks())

    def get_validation_tasks(self) -> list[Task]:
        """Return the validation tasks in a new random order. For a reproducible order, call
        `random.seed` first."""
        return _shuffled(self.generate_validation_tasks())


def _shuffled(tasks: Iterable[Task]) -> list[Task]:
    shuffled = list(tasks)
    random.shuffle(shuffled)
    return shuffled


def _read_dummies(config: AjetTaskReader, split: Split) -> Iterable[Task]:
    tasks = [
        Task(
            main_query=f"[dummy task @ {number}]",
            task_id=str(number),
            metadata={"random_number": number},
        )
        for number in range(NUM_DUMMY_TASKS)
    ]
    random.Random(_DUMMY_SEED).shuffle(tasks)
    return tasks


def _read_jsonl_file(config: AjetTaskReader, split: Split) -> Iterable[Task]:
    files = config.jsonl_dataset_file
    file = files.training if split == "training" else files.validation
    if not file.file_path:
        raise ConfigError(
            f"jsonl_dataset_file.{split}.file_path is not set: set it to the path of a JSON Lines "
            "file."
        )
    return read_jsonl_tasks(Path(file.file_path))


def _read_hf_repo(config: AjetTaskReader, split: Split) -> Iterable[Task]:
    repo = config.huggingface_dat_repo
    name = repo.training_split if split == "training" else repo.validation_split
    file = Path(repo.dataset_path) / f"{name}.jsonl"
    if file.is_file():
        return JsonlReader(file)
    return HfReader(repo.dataset_path, split=name, name=repo.dataset_name)


_READ_FUNCTIONS: dict[str, Callable[[AjetTaskReader, Split], Iterable[Task]]] = {
    RANDOM_DUMMY: _read_dummies,
    JSONL_FILE: _read_jsonl_file,
    HF_REPO: _read_hf_repo,
}
