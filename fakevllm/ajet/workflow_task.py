"""WorkflowTask, the argument that AgentJet passes to a workflow (a function that runs an agent).

A WorkflowTask has the task and the task's position in the batch.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import Task


class WorkflowTask(BaseModel):
    """A task in the form in which AgentJet passes it to a workflow (a function that runs an agent).

    Scripts create a WorkflowTask themselves and pass it to their own workflow. fakevllm itself
    reads none of the fields.
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
    """Data that the running workflow shows to an observer."""
    llm_inference_fn: Any = None
    """Function that sends a request to the model."""
    tokenizer: Any = None
    gym_env: Any = None
    """Handle of the task's environment."""
