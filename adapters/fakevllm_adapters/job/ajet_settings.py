"""The settings of a TrainJob that AgentJet's jobs have too, by AgentJet's names.

docs/job.md says what each setting does with which engine.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

CollectionMethod = Literal[
    "rollout_until_finish_enough_episodes",
    "rollout_until_finish_enough_tasks",
    "rollout_until_finish_enough_non_dummy_tasks",
    "rollout_until_any_client_agree_sync_weight",
    "rollout_until_all_clients_agree_sync_weight",
]


def list_as_text(value: object) -> object:
    """Join a list with commas; return any other value unchanged."""
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else value


class RunSection(BaseModel):
    """The run's names and the outputs of its curves."""

    base_yaml_config: str | None = None
    """YAML file with settings for all that the job itself does not set. The SDK reads it."""
    experiment_dir: str | None = None
    project_name: str | None = None
    experiment_name: str | None = None
    ensure_new_experiment: bool = False
    """Whether the SDK appends the time to experiment_name, so that no earlier run is continued."""
    logging: Annotated[str | None, BeforeValidator(list_as_text)] = None
    """Comma-separated names of the outputs of the curves."""
    train_print_to_markdown_file_path: str | None = None
    val_print_to_markdown_file_path: str | None = None


class LengthSection(BaseModel):
    """Maximum lengths in tokens.

    A job sets either all four lengths or none of them. There is one exception: a job with
    overlong_buffer_len may set only max_response_length.
    """

    max_prompt_length: int | None = Field(default=None, ge=1)
    """Length of the prompt before the first sampled token."""
    max_response_length: int | None = Field(default=None, ge=1)
    """Length from the first sampled token to the end of the episode, over all its calls."""
    max_response_length_in_one_turn: int | None = Field(default=None, ge=1)
    """Length of one answer. It limits the calls in episodes of active clients, and is their token
    limit if a call sets none."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Length of the prompt and all answers together."""

    @property
    def max_answer_length(self) -> int | None:
        """Maximum length of the answer to one call, in tokens.

        If the job sets no limit per turn, max_response_length is the maximum, because the response
        of an episode with a single call is that call's answer.
        """
        return self.max_response_length_in_one_turn or self.max_response_length


class EngineSection(BaseModel):
    """Settings of the engine and the trainer. The server's own flags override them."""

    backbone: str | None = None
    n_gpu: int | None = Field(default=None, ge=1)
    """Number of GPUs per node. It must divide the number of a step's episodes."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum number of answers decoded at the same time."""
    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """Number of GPUs over which each layer of an engine is split."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    mini_batch_num: int = Field(default=1, ge=1)
    """Number of mini-batches of a step, each with its own update."""
    lora_load_format: str = "auto"
    layered_summon: bool = False


class CollectionSection(BaseModel):
    """Rules by which the episodes of active clients form a step."""

    swarm_mode: bool = True
    """Whether clients run the episodes."""
    swarm_mode_sample_collection_method: CollectionMethod = "rollout_until_finish_enough_tasks"
    max_env_worker: int | None = Field(default=None, ge=1)
    """Approximate maximum number of concurrent episodes of all clients."""
    compute_madness_checklist: tuple[str, ...] = ()


class SwarmSections(RunSection, LengthSection, EngineSection, CollectionSection):
    """All settings of a TrainJob that AgentJet's jobs have too."""
