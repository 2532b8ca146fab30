"""AgentJet's argument of a workflow: a task, and where in a batch the task runs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import Task


class WorkflowTask(BaseModel):
    """A task as AgentJet passes it to a workflow, which is the code that runs an agent.

    Scripts create it themselves and pass it to their own workflow. fakevllm reads none of the
    fields.
    """

    task: Task = Field(default_factory=Task)
    env_type: str = ""
    task_id: str = ""
    task_thread_index: int = 0
    """Number of the thread that runs the task."""
    task_batch_index: int = 0
    """Position of the task in its batch."""
    task_tag: str = ""
    """Label of the task for log lines."""
    episode_uuid: str = ""
    observation_window: dict[str, Any] = Field(default_factory=dict)
    """Data that the workflow shows to an observer while it runs."""
    llm_inference_fn: Any = None
    """Function that asks the model."""
    tokenizer: Any = None
    gym_env: Any = None
    """Handle of the task's environment."""
