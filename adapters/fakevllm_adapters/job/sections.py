"""Settings of a job that AgentJet's jobs have too, by its names: the run's labels, lengths, the
engine. docs/job.md says which of them do what on which engine."""

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
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else value


class RunSection(BaseModel):
    """What the run is called, and where it says how it goes."""

    base_yaml_config: str | None = None
    """A YAML file whose settings count where the job itself names none: the SDK reads it."""
    experiment_dir: str | None = None
    project_name: str | None = None
    experiment_name: str | None = None
    ensure_new_experiment: bool = False
    """The SDK puts the time behind experiment_name, so that no earlier run is gone on with."""
    logging: Annotated[str | None, BeforeValidator(list_as_text)] = None
    """Where curves go: names, with commas."""
    train_print_to_markdown_file_path: str | None = None
    val_print_to_markdown_file_path: str | None = None


class LengthSection(BaseModel):
    """In tokens. All four or none, but for max_response_length, which may stand beside
    overlong_buffer_len alone."""

    max_prompt_length: int | None = Field(default=None, ge=1)
    """Before the first sampled token."""
    max_response_length: int | None = Field(default=None, ge=1)
    """From there to an episode's end, over all its calls."""
    max_response_length_in_one_turn: int | None = Field(default=None, ge=1)
    """Of one answer: what a call of an active client's episode gets at most, and where it asks for
    nothing."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Prompt and answers together."""

    @property
    def max_answer_length(self) -> int | None:
        """Of one call: an episode of a single answer has but that for its response."""
        return self.max_response_length_in_one_turn or self.max_response_length


class EngineSection(BaseModel):
    """What samples and trains, and on how many GPUs. The server's own flags win."""

    backbone: str | None = None
    n_gpu: int | None = Field(default=None, ge=1)
    """GPUs a node, between which a step's episodes must divide."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Answers decoded at a time."""
    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """GPUs that one engine's layers are spread over."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    mini_batch_num: int = Field(default=1, ge=1)
    """Parts of a step's batch, each with an update of its own."""
    lora_load_format: str = "auto"
    layered_summon: bool = False


class CollectionSection(BaseModel):
    """How episodes of active clients come to be a step."""

    swarm_mode: bool = True
    """Clients bring the episodes."""
    swarm_mode_sample_collection_method: CollectionMethod = "rollout_until_finish_enough_tasks"
    max_env_worker: int | None = Field(default=None, ge=1)
    """Episodes of all clients that run at a time, roughly."""
    compute_madness_checklist: tuple[str, ...] = ()


class SwarmSections(RunSection, LengthSection, EngineSection, CollectionSection):
    pass
