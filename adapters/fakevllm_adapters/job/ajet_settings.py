"""Settings of a training job that have the same names and meanings in AgentJet, a framework for
training agents.

docs/job.md describes the effect of each setting with each engine.
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


def _kl_penalty_name(value: object) -> object:
    """Return `kl` for `k1`, because both are names of the same KL estimator. Return other values
    unchanged."""
    return "kl" if value == "k1" else value


def list_as_text(value: object) -> object:
    """Return a list as a string with commas between the elements. Return other values unchanged."""
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else value


class RunSection(BaseModel):
    """The names of a training run, and the outputs to which its metrics are written."""

    base_yaml_config: str | None = None
    """YAML file with values for the settings that the job itself does not set. The SDK reads the
    file."""
    experiment_dir: str | None = None
    """Folder for the run's files. The server's --run-dir is used instead."""
    project_name: str | None = None
    """Label of the project. It is only stored."""
    experiment_name: str | None = None
    """Name of the run. A new name starts a new run, and the name of an earlier run continues it."""
    ensure_new_experiment: bool = False
    """Whether the SDK appends the time to experiment_name, so that no earlier run is continued."""
    logging: Annotated[str | None, BeforeValidator(list_as_text)] = None
    """Comma-separated names of the loggers to which the metrics are written."""
    train_print_to_markdown_file_path: str | None = None
    """File for the metrics of each training step."""
    val_print_to_markdown_file_path: str | None = None
    """File for the metrics of each validation."""


class LengthSection(BaseModel):
    """Maximum lengths in tokens.

    A job must set either all four lengths or none of them. As an exception, a job with the length
    penalty (overlong_buffer_len) may set only max_response_length.
    """

    max_prompt_length: int | None = Field(default=None, ge=1)
    """Maximum length of the prompt before the first sampled token. It is only compared with the
    other settings: longer prompts are trained, too."""
    max_response_length: int | None = Field(default=None, ge=1)
    """Maximum length from the first sampled token to the end of the episode, over all its calls.
    Longer episodes are trained, too. The length penalty (`overlong_buffer_len`) uses this length
    if `max_response_length_in_one_turn` is not set."""
    max_response_length_in_one_turn: int | None = Field(default=None, ge=1)
    """Maximum length of the answer to one call. The limit applies only to episodes that clients
    run, and not to calls through a proxy. A call without a token limit, or with a higher one, gets
    this limit."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum length of the prompt and all answers together."""

    @property
    def max_answer_length(self) -> int | None:
        """Maximum length of the answer to one call, in tokens.

        If the job sets max_response_length_in_one_turn, the result is this length. Otherwise it is
        max_response_length. In an episode with a single call, the two lengths mean the same.
        """
        return self.max_response_length_in_one_turn or self.max_response_length


class EngineSection(BaseModel):
    """Settings of the engine and the trainer. The server's own flags override them."""

    backbone: str | None = None
    """Training backend of AgentJet. The server's own flags choose the engines instead."""
    n_gpu: int | None = Field(default=None, ge=1)
    """Number of GPUs per node. It must divide the number of episodes per training step. It is only
    compared with the other settings: the server trains on the GPUs that it was given."""
    nnodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that vLLM uses."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum number of answers decoded at the same time."""
    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """Number of GPUs over which each layer of an engine is split."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs over which one sequence is split."""
    kl_penalty_type: Annotated[str, BeforeValidator(_kl_penalty_name)] = "kl"
    """Estimator of the KL in the reward. `k1` is another name for `kl`."""
    lora_load_format: str = "auto"
    """Format in which AgentJet's engine loads LoRA adapters."""
    layered_summon: bool = False
    """Whether AgentJet's trainer collects LoRA adapters layer by layer."""


class CollectionSection(BaseModel):
    """Settings for collecting the episodes of a training step from clients that run agents."""

    swarm_mode: bool = True
    """Whether clients run the episodes."""
    swarm_mode_sample_collection_method: CollectionMethod = "rollout_until_finish_enough_tasks"
    """Rule by which a step has enough episodes of clients."""
    max_env_worker: int | None = Field(default=None, ge=1)
    """Approximate maximum number of concurrent episodes of all clients."""
    compute_madness_checklist: tuple[str, ...] = ()
    """Kinds of nonsense output that end an episode."""
    timeline_compare_level: Literal["token", "text"] = "token"
    """What is compared to decide whether one call continues another: tokens or text."""


class SwarmSections(RunSection, LengthSection, EngineSection, CollectionSection):
    """All settings that fakevllm's and AgentJet's training jobs have in common."""
