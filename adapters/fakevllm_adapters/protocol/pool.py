"""The swarm protocol: the batch that is being collected, as clients are told of it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MAX_ID_CHARS = 200
"""Of a client, a mix, a kind of episode."""
MAX_TASK_CHARS = 1_000
"""Of a task's id, which is told to all who ask for the batch."""
LEAST_SHARE = 1e-6
"""Counts divided by less leave floating point."""


class ThrottlePolicy(BaseModel):
    """How much of each batch one kind of task may be, so that several make a mix."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    share: float | None = Field(default=None, ge=LEAST_SHARE, le=1)
    """Of the tasks of a batch. Shares are taken in proportion to each other, and only among the
    mixes that ask for episodes."""
    mix: str = Field(default="", max_length=MAX_ID_CHARS)
    """What shares are counted by, such as "math"; empty: each client is a mix of its own."""
    current_task_id: str = Field(default="", max_length=MAX_TASK_CHARS)
    """The task that the episode is for. Repeats of a task that has begun are never held back."""
    ratio: float = Field(default=1.5, gt=0)
    """How far a mix may run ahead of its share, in its tasks of one batch."""
    expected_batch_size: int | None = Field(default=None, ge=1)
    """The share, in tasks of a batch: AgentJet's way to say it."""
    expected_num_repeat: int | None = Field(default=None, ge=1)

    @property
    def asks_for_share(self) -> bool:
        return self.share is not None or self.expected_batch_size is not None

    def share_of(self, batch_size: int) -> float | None:
        """None: it asks for none."""
        if self.share is None and self.expected_batch_size is not None:
            return min(1.0, self.expected_batch_size / batch_size)
        return self.share


class EpisodeStatus(BaseModel):
    episode_uuid: str
    episode_status: str = ""
    """registered or claimed."""
    episode_type: str = "train"
    openai_base_url: str = ""
    openai_api_key: str = ""
    """Masked."""
    client_uuid: str = ""
    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float = 0.0
    """Unix seconds."""
    discard_episode_timeout: float = -1.0
    """Seconds; -1 while unclaimed."""
    llm_call_count: int = 0
    debug_log: list[str] = []
    optional_task_id: str = ""


class EpisodeBuffer(BaseModel):
    buffer: list[EpisodeStatus]


class PoolInformation(BaseModel):
    """AgentJet's CurrentBatchRolloutPoolInformation, member by member."""

    model_config = ConfigDict(protected_namespaces=())

    sample_collection_method: str = ""
    completed_episodes: int = 0
    completed_episode_target: int = 0
    completed_tasks: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    """Whose rewards are not all equal."""
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = {}
    """Task id to episode uuids."""
    completed_tasks_rewards: dict[str, list[float]] = {}
    running_episode_details: dict[str, dict[str, str]] | None = None
    """By episode uuid; None where nothing is claimed."""
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = None
    """Unix seconds."""
    completed_tasks_client_uuids: dict[str, list[str]] = {}
    """Of episodes that were claimed with a throttle policy; one entry an episode."""
    training_model_path: str | None = None
    swarm_client_instruction: dict[str, Any] | None = None
    """{"active_clients": [{client_uuid, last_activity_at, allowed_sync_weight}]}"""


class AgreeRequest(BaseModel):
    client_uuid: str


class ExperimentDirReply(BaseModel):
    server_experiment_dir: str | None = None
