"""Load everything that a run needs besides the server: job, workflow and tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fakevllm.train import step_schedule
from fakevllm.train.config import Settings
from fakevllm.train.dataset import load_tasks
from fakevllm.train.user_workflow import load_workflow
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    job: TrainJob
    workflow: Callable[..., Any]
    """The user's function, which takes (task, access), runs one episode, and returns a number or a
    WorkflowOutput. It may be a coroutine function."""
    workflow_name: str
    """Name of the workflow as FILE.py:FUNCTION, for error messages."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    """Tasks of the evaluations before and after training; empty without evaluations."""
    num_steps: int
    max_parallel: int
    """Maximum number of episodes that run at once."""


def load_inputs(settings: Settings) -> TrainingInputs:
    """Import the agent's workflow, load the datasets, and compute the number of training steps.

    Raises ConfigError if the workflow or a dataset cannot be loaded. Raises ConfigError as well if
    the dataset is too small for one step.
    """
    section, folder = settings.train, settings.file.parent
    workflow = load_workflow(section.workflow, folder)
    tasks = load_tasks(section.dataset, section.field, folder)
    num_steps = step_schedule.num_steps(settings.job, section.epochs, len(tasks))
    eval_tasks: list[Task] = []
    if section.eval_dataset is not None:
        eval_tasks = load_tasks(section.eval_dataset, section.field, folder)
    return TrainingInputs(
        # The server needs the number of steps, because it saves a checkpoint after the last one.
        job=settings.job.model_copy(update={"total_training_steps": num_steps}),
        workflow=workflow,
        workflow_name=section.workflow,
        tasks=tasks,
        eval_tasks=eval_tasks,
        num_steps=num_steps,
        max_parallel=section.max_parallel,
    )
