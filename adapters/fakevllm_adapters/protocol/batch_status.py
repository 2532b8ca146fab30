"""Swarm protocol messages about the batch of episodes that the server is collecting for a training
step.

The names of the fields are those of AgentJet, a framework for training agents.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MAX_ID_CHARS = 200
"""Maximum length of the id of a client, of a mix or of an episode type."""
MAX_TASK_CHARS = 1_000
"""Maximum length of a task id. The server sends task ids to every client that requests the
batch."""
LEAST_SHARE = 1e-6
"""Smallest allowed share. Counts are divided by shares, and a smaller divisor could overflow."""


class ThrottlePolicy(BaseModel):
    """A limit on the share of each batch that one mix may fill.

    A mix is a named kind of tasks, such as "math". Such limits make sure that a batch has tasks of
    several kinds.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    share: float | None = Field(default=None, ge=LEAST_SHARE, le=1)
    """Fraction of the tasks of a batch that the mix may fill. Only mixes that currently claim
    episodes are considered. Their shares are scaled so that the sum is 1."""
    mix: str = Field(default="", max_length=MAX_ID_CHARS)
    """Name of the mix, such as "math". If the name is empty, the client is a mix of its own."""
    current_task_id: str = Field(default="", max_length=MAX_TASK_CHARS)
    """Task of the episode. Further episodes of a task that has begun are never held back."""
    ratio: float = Field(default=1.5, gt=0)
    """Factor by which a mix may exceed its share of the tasks of one batch."""
    expected_batch_size: int | None = Field(default=None, ge=1)
    """AgentJet's form of the share: a number of tasks per batch. `share` overrides it."""
    expected_num_repeat: int | None = Field(default=None, ge=1)
    """A setting of AgentJet's that is accepted and has no effect."""

    @property
    def has_share(self) -> bool:
        """Whether the policy limits a mix (a kind of tasks) to a share of each batch, either by the
        field `share` or by the field `expected_batch_size`."""
        return self.share is not None or self.expected_batch_size is not None

    def share_of(self, batch_size: int) -> float | None:
        """Return the fraction of a batch to which the policy limits a mix (a kind of tasks). Return
        None if the policy sets no such limit.

        `batch_size` is the number of tasks in a batch.
        """
        if self.share is None and self.expected_batch_size is not None:
            return min(1.0, self.expected_batch_size / batch_size)
        return self.share


class EpisodeStatus(BaseModel):
    """The state of one episode. The fields are the same as in AgentJet, a framework for training
    agents."""

    episode_uuid: str
    episode_status: str = ""
    """Status of the episode: `registered` or `claimed`."""
    episode_type: str = "train"
    openai_base_url: str = ""
    openai_api_key: str = ""
    """API key of the episode, masked."""
    client_uuid: str = ""
    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float = 0.0
    """Time of the latest activity, in Unix seconds."""
    discard_episode_timeout: float = -1.0
    """Seconds without activity after which the claim ends; -1 if the episode is not claimed."""
    llm_call_count: int = 0
    debug_log: list[str] = []
    optional_task_id: str = ""


class EpisodeBuffer(BaseModel):
    """The server's reply with the states of all episodes."""

    buffer: list[EpisodeStatus]


class PoolInformation(BaseModel):
    """Progress of the batch that the server is collecting for the next training step.

    The fields are those of the class CurrentBatchRolloutPoolInformation of AgentJet, a framework
    for training agents.
    """

    model_config = ConfigDict(protected_namespaces=())

    sample_collection_method: str = ""
    completed_episodes: int = 0
    completed_episode_target: int = 0
    completed_tasks: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    """Completed tasks whose rewards are not all equal."""
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = {}
    """Uuids of the completed episodes, by task id."""
    completed_tasks_rewards: dict[str, list[float]] = {}
    """Rewards of the completed episodes, by task id."""
    running_episode_details: dict[str, dict[str, str]] | None = None
    """Details by episode uuid; None if no episode is claimed."""
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = None
    """Time at which the engine began to start, in Unix seconds."""
    completed_tasks_client_uuids: dict[str, list[str]] = {}
    """Client uuids by task id. Each list has one uuid for each episode that was claimed with a
    throttle policy."""
    training_model_path: str | None = None
    swarm_client_instruction: dict[str, Any] | None = None
    """Clients that take part in the batch: {"active_clients": [{client_uuid, last_activity_at,
    allowed_sync_weight}]}"""


class AgreeRequest(BaseModel):
    """A request with which a client agrees to train on the episodes that were collected so far."""

    client_uuid: str


class ExperimentDirReply(BaseModel):
    """The server's reply that names its experiment directory. The field has the same name as in
    AgentJet."""

    server_experiment_dir: str | None = None
