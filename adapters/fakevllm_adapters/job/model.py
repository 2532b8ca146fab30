"""The job: what to train and how, and its YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fakevllm_adapters.job.sections import SwarmSections, list_as_text
from fakevllm_adapters.job.yaml import one_line, under_one_name, written

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
MAX_BATCH_SIZE = 10_000
"""What a server holds of groups that wait."""
LossUnit = Literal["call", "timeline", "episode"]
KlType = Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "k3+", "low_var_kl+"]


def _number_as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _flag_as_word(value: object) -> object:
    """verl's `filter_groups.enable`."""
    return ("collect" if value else "keep") if isinstance(value, bool) else value


FilterGroups = Annotated[Literal["keep", "drop", "collect"], BeforeValidator(_flag_as_word)]
Threshold = Annotated[str, BeforeValidator(_number_as_text)]
"""`HIGH` or `LOW_HIGH`; a plain number is HIGH."""


class TrainJob(SwarmSections):
    """What to train and how. `[job]` in fakevllm.toml spells the same fields, and so do the
    arguments of AgentJet's job; job_yaml.py reads its YAML."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    model: str | None = None
    """Model folder. The server's own --model wins."""
    num_repeat: int = Field(default=4, ge=1, le=256)
    """Siblings per request (N)."""
    batch_size: int = Field(default=8, ge=1, le=MAX_BATCH_SIZE)
    """Groups per step."""
    temperature: float = Field(default=1.0, gt=0)
    """At which siblings are sampled. The lead keeps the app's own."""
    algorithm: Literal[
        "grpo",
        "rloo",
        "opo",
        "grpo_passk",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
    ] = "grpo"
    """How rewards become advantages: fakevllm_server.algorithms."""
    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO."""
    std_floor: float = Field(default=0.05, gt=0)
    """Least divisor of a group's centred rewards, so that judge noise is not blown up."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount from token to token."""
    use_kl_in_reward: bool = False
    """Each token's reward is less kl_coef times its log-ratio to the starting weights."""
    kl_coef: float = Field(default=0.001, gt=0)
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """The last tokens before the longest an answer may be (`max_answer_length`), over which a
    penalty grows; None is no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """What an answer of that length loses of its reward."""
    filter_groups: FilterGroups = "keep"
    """Groups whose rewards are all equal: `keep` has them in their step, where KL and entropy pull
    on them; `drop` drops them, and they count to batch_size; `collect` drops them, and the step
    waits for others. false is keep, true is collect."""
    max_num_gen_batches: int = Field(default=10, ge=1)
    """Batches of groups after which a step that collects is made of those with signal there
    are."""
    partial_tasks: Literal["train", "drop"] = "train"
    """A task of active clients of which some episodes never come: compared as far as it is there,
    or dropped."""
    partial_after_s: float = Field(default=3600.0, gt=0)
    """How long a task waits for its next episode before it counts as partial."""
    loss: Literal["vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg"] = "vanilla"
    loss_agg_mode: Aggregation | None = None
    """From a loss per token to one number; None is the loss's own way."""
    loss_unit: LossUnit = "episode"
    """What counts as one sequence."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor of seq-mean-token-sum-norm; None is the longest unit of the step."""
    lr: float = Field(default=1e-6, gt=0)
    ppo_epochs: int = Field(default=1, ge=1)
    """Optimiser updates per step, each over the whole batch."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens in one forward pass; beside a call that is longer, so many more."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass and keep no activations (the embedded
    trainer)."""
    lora_rank: int = Field(default=0, ge=0)
    """Above 0 the weights stay as they are, and adapters of this rank train (the embedded
    trainer)."""
    lora_alpha: int = Field(default=16, gt=0)
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""
    target_modules: Annotated[str, BeforeValidator(list_as_text)] = "all-linear"
    """Which linear layers get an adapter: all but the LM head, or their names, with commas.
    `lora_target_modules` is taken for it too."""
    forest: bool = True
    """Whether what calls share goes through the model once (the embedded trainer). The weights are
    the same either way, but for rounding."""
    clip_ratio_low: float | None = Field(default=None, gt=0)
    clip_ratio_high: float | None = Field(default=None, gt=0)
    """None is the loss's own bound."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative."""
    grad_clip: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting weights."""
    kl_loss_type: KlType = "low_var_kl"
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    tau_pos: float = Field(default=1.0, gt=0)
    tau_neg: float = Field(default=1.05, gt=0)
    bypass_mode: bool = True
    """The engine's log-probabilities are the old policy's; False: the trainer computes its own."""
    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: Threshold = "2.0"
    rollout_is_batch_normalize: bool = False
    """Those weights are divided by their mean over the step."""
    rollout_rs: str | None = None
    rollout_rs_threshold: Threshold | None = None
    max_mismatch_k3: float | None = Field(default=1.0, gt=0, lt=10)
    """A step in which trainer and engine are further apart (KL, k3) makes no update, and after some
    in a row training stops. A token's part ends at 10; None is no limit."""
    max_staleness: int = Field(default=4, ge=0)
    """Oldest weights a call may come from, in versions; older calls are dropped and counted."""
    save_freq: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    total_training_steps: int | None = Field(default=None, ge=1)
    """After this step the server keeps serving and stops training."""
    seed: int = 0
    lockstep: bool = False
    """Groups one after another, each with seeds of its row, so that two runs of one seed are the
    same to the bit (the embedded engine on a CPU)."""
    control: Literal["none", "frozen", "shuffled"] = "none"
    """Experiments that must not learn: no updates, or rewards shuffled inside each group."""

    @property
    def needs_reference(self) -> bool:
        """Whether it is held to the starting weights."""
        return self.kl_loss_coef > 0 or self.use_kl_in_reward

    def as_yaml(self) -> str:
        """Without what is at its default: a server that does not know a setting yet refuses only a
        job that makes use of it."""
        return yaml.safe_dump({"job": self.model_dump(exclude_defaults=True)}, sort_keys=False)

    @model_validator(mode="before")
    @classmethod
    def _under_one_name(cls, given: Any) -> Any:
        return under_one_name(given)

    if TYPE_CHECKING:  # for whom it is an argument, too
        lora_target_modules: str = "all-linear"
    else:

        @property
        def lora_target_modules(self) -> str:
            """AgentJet's name for target_modules."""
            return self.target_modules

    @staticmethod
    def from_yaml(text: str) -> TrainJob:
        """As `read_job`, which says more."""
        return read_job(text).job


class ReadJob(NamedTuple):
    job: TrainJob
    warnings: list[str]
    """What the YAML asks for and this schema has no setting for."""


def read_job(text: str) -> ReadJob:
    """A `job:` of ours, or AgentJet's `ajet:`. Raises ValueError, in one line, for anything
    else."""
    read = written(text)
    try:
        return ReadJob(TrainJob.model_validate(read.settings), read.warnings)
    except ValidationError as error:
        raise ValueError(one_line(error, TrainJob.model_fields, read.keys)) from None
