"""All settings of a training job, with their types, defaults and ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fakevllm_adapters.job.ajet_settings import SwarmSections, list_as_text
from fakevllm_adapters.job.yaml_reader import (
    describe_errors,
    merge_target_modules,
    parse_job_yaml,
    resolve_kl_loss,
)
from fakevllm_adapters.privacy.settings import PrivacySettings

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
MAX_BATCH_SIZE = 10_000
"""Largest `batch_size`. It is also the maximum number of groups that may wait on a server for a
training step."""
MAX_ASYNC_STEPS = 16
"""Largest `async_steps`. With more batches ahead, hardly any token is trained by weights that are
close to those that sampled the token."""
LossUnit = Literal["call", "timeline", "episode"]
WITH_REFERENCE = frozenset({"dpo", "kto"})
"""Demonstration losses that compare the policy with the reference policy."""
KlType = Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "k3+", "low_var_kl+"]


def _number_as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _flag_as_word(value: object) -> object:
    """Translate verl's boolean `filter_groups.enable` to a value of the job's setting
    `filter_groups`.

    True becomes "collect", and False becomes "keep". Any other value is returned unchanged.
    """
    return ("collect" if value else "keep") if isinstance(value, bool) else value


FilterGroups = Annotated[Literal["keep", "drop", "collect"], BeforeValidator(_flag_as_word)]
Threshold = Annotated[str, BeforeValidator(_number_as_text)]
"""`HIGH` or `LOW_HIGH`; a plain number is HIGH."""


class TrainJob(SwarmSections):
    """All settings of a training job.

    The section `[job]` in fakevllm.toml, and the arguments of the SDK's class `AgentJetJob`, have
    the same names as the fields of this class. `job/yaml_reader.py` reads the job's YAML.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    model: str | None = None
    """Model folder. If the server has `--models-dir`, this is a folder below that one. Otherwise
    the server's own `--model` overrides it."""
    num_repeat: int = Field(default=4, ge=1, le=256)
    """Number of answers that are sampled for each request (siblings), and number of episodes per
    task. With 1, requests are served once and not trained."""
    batch_size: int = Field(default=8, ge=1, le=MAX_BATCH_SIZE)
    """Number of groups per training step."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of a request's siblings. Sibling 0 answers the app's own request, and
    keeps that request's temperature. If a call of an active client sets no temperature, it gets
    this one. As an exception, the default 1 gives such a call the engine's own default."""
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
    """Estimator that computes advantages from rewards."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether advantages are divided by the rewards' standard deviation. False is Dr. GRPO."""
    std_floor: float = Field(default=0.05, gt=0)
    """Smallest standard deviation by which a group's centred rewards are divided. Without the
    floor, the noise in a judge's nearly equal rewards would be amplified."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, for the algorithm `reinforce_plus_plus`."""
    use_kl_in_reward: bool = False
    """Whether kl_coef times the token's log-ratio to the starting weights is subtracted from each
    token's reward."""
    kl_coef: float = Field(default=0.001, gt=0)
    """Weight of the KL in the reward, for `use_kl_in_reward`."""
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """Number of tokens over which the length penalty grows from 0 to its full value. The penalty
    has its full value for an answer of `max_response_length_in_one_turn` tokens or, if that is not
    set, of `max_response_length` tokens. None means no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """Penalty subtracted from the reward of an answer of the maximum length."""
    filter_groups: FilterGroups = "keep"
    """Treatment of groups whose rewards are all equal. `keep` trains them. Normally their
    advantages are 0, but they count in the denominators of the loss, as in verl. `drop` does not
    train them, but they still count towards `batch_size`. `collect` neither trains nor counts them,
    so the step waits for other groups. The value False means `keep`, and True means `collect`."""
    max_num_gen_batches: int = Field(default=10, ge=1)
    """Limit for `filter_groups = collect`, as a number of batches. When this many batches of groups
    have been collected, the step stops waiting. It trains only the groups whose rewards differ."""
    partial_tasks: Literal["train", "drop"] = "train"
    """Treatment of clients' tasks with missing episodes: train the episodes that arrived, or drop
    the task."""
    partial_after_s: float = Field(default=3600.0, gt=0)
    """Seconds that a task waits for its next episode before it counts as partial."""
    loss: Literal["vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "sft", "dpo", "kto"] = (
        "vanilla"
    )
    """Loss of a step. `sft`, `dpo` and `kto` train demonstrations, which are made of the siblings
    of a group. All others are policy losses."""
    demonstration_loss: Literal["sft", "dpo", "kto"] | None = None
    """Loss of demonstrations that is added to the policy loss. None means no such term."""
    demonstration_loss_coef: float = Field(default=1.0, gt=0)
    """Weight of the demonstration loss beside the policy loss."""
    preference_beta: float = Field(default=0.1, gt=0)
    """Factor of the log-ratios to the starting weights in `dpo` and `kto`. A larger factor keeps
    the model closer to the starting weights."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of desirable answers in `kto`."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of undesirable answers in `kto`."""
    loss_agg_mode: Aggregation | None = None
    """Aggregation of the losses of tokens into one number; None means the loss's default."""
    loss_unit: LossUnit = "episode"
    """Unit that the loss treats as one sequence. A `timeline` is a chain of calls in an episode."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor of seq-mean-token-sum-norm; None means the length of the step's longest sequence."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Number of optimizer updates per step that each group of the batch takes part in."""
    mini_batch_num: int = Field(default=1, ge=1)
    """Number of mini-batches into which a step's batch is divided. Each mini-batch has whole
    groups, and makes `ppo_epochs` optimizer updates. A step with fewer groups has one mini-batch
    for each group."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Maximum number of tokens in a forward pass. Lower it if memory runs out. A call that is
    longer than this maximum is not split. Its pass may also have tokens of other calls, up to this
    maximum."""
    gradient_checkpointing: bool = False
    """Whether the trainer stores no activations of layers and recomputes them in the backward pass.
    This needs less memory, and a third more time. On accelerators, the verl trainer always does
    this, unless it is started with `--no-gradient-checkpointing`."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters, which are trained instead of the weights. 0 means full training."""
    lora_alpha: int = Field(default=16, gt=0)
    """LoRA alpha: the output of an adapter is multiplied by lora_alpha / lora_rank."""
    target_modules: Annotated[str, BeforeValidator(list_as_text)] = "all-linear"
    """Linear layers with a LoRA adapter: comma-separated names, or `all-linear` for all except the
    LM head. `lora_target_modules` is a synonym."""
    forest: bool = True
    """Whether the embedded and the verl trainer compute shared prefixes of calls once. The
    resulting weights are the same except for rounding. Each step reports what this saves, as `rho`.
    Some model architectures cannot share prefixes. `engine.log` or `trainer.log` then gives the
    reason."""
    clip_ratio_low: float | None = Field(default=None, gt=0)
    """Lower clip range: the ratio of new to old probability is clipped below at 1 -
    `clip_ratio_low`. None means the loss's default."""
    clip_ratio_high: float | None = Field(default=None, gt=0)
    """Upper clip range: the ratio of new to old probability is clipped above at 1 +
    `clip_ratio_high`. None means the loss's default."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Bound on the probability ratio where the advantage is negative (dual-clip PPO)."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the loss's KL term, which penalizes the distance from the starting weights. With
    AgentJet's switch `use_kl_loss: false`, this weight is 0. With `use_kl_loss: true`, it is
    AgentJet's default unless the job sets another weight."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator of the KL in the loss. `k1` and `kl`, `k2` and `mse`, and `k3` and `low_var_kl` are
    names of the same estimator."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    tau_pos: float = Field(default=1.0, gt=0)
    """Temperature of the loss `sapo` for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Temperature of the loss `sapo` for all other advantages."""
    bypass_mode: bool = True
    """Where the log-probabilities of the old policy come from. If True, the engine has reported
    them with the answers. If False, the trainer computes them."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights for the difference between trainer and engine, per token or per sequence.
    None means no weights."""
    rollout_is_threshold: Threshold = "2.0"
    """Bounds of the importance weights: `HIGH`, or `LOW_HIGH` as a text. Without quotes, TOML and
    YAML read `0.5_2` as the number 0.52."""
    rollout_is_batch_normalize: bool = False
    """Whether the importance weights are divided by their mean over the step."""
    rollout_rs: str | None = None
    """Rejection sampling between trainer and engine: comma-separated names of divergences."""
    rollout_rs_threshold: Threshold | None = None
    """Threshold of the rejection by `rollout_rs`: `HIGH`, or `LOW_HIGH` as a text, in quotes."""
    max_mismatch_k3: float | None = Field(default=1.0, gt=0, lt=10)
    """Largest mean KL (k3) between trainer and engine. A step above this limit makes no update.
    After three such steps in a row, training stops, and serving continues. The k3 of a single token
    is capped at 10, so a limit near 10 is almost no limit. None means no limit."""
    max_staleness: int = Field(default=4, ge=0)
    """Maximum age, in versions, of the weights that sampled a call. Calls of older weights are not
    trained, and a metric counts them."""
    async_steps: int = Field(default=0, ge=0, le=MAX_ASYNC_STEPS)
    """Number of batches that may be collected ahead of the running training step. With 0, clients
    claim episodes between steps only. Otherwise, clients also claim episodes during a step, and no
    trained call has tokens of two versions. `max_staleness` must be at least as large."""
    logged_weight_bound: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weights of logged groups, which an earlier run has sampled."""
    min_logged_ess: float = Field(default=0.5, ge=0, le=1)
    """Smallest effective sample size of a step's logged groups, as a share of their tokens. A step
    below this limit makes no update."""
    save_freq: int = Field(default=10, ge=1)
    """Number of steps between checkpoints."""
    total_training_steps: int | None = Field(default=None, ge=1)
    """Number of the last step. After this step, the server only serves and no longer trains."""
    seed: int = 0
    """Random seed for shuffles, and for the choice between equally good siblings if the request has
    no seed. With `lockstep`, it is also the seed for sampling."""
    lockstep: bool = False
    """Whether groups run one after another, each with a seed that follows from its dataset row. Two
    runs with the same seed are then bit-identical (with the embedded engine on a CPU)."""
    control: Literal["none", "frozen", "shuffled"] = "none"
    """Control experiments in which nothing must be learned. `frozen` makes no updates. `shuffled`
    permutes the rewards within each group."""
    privacy: PrivacySettings | None = None
    """What is redacted before it is written, and how long contents are kept: a mapping with
    `redact`, `patterns`, `retention_days` and `max_journal_mb`. The server adds its own settings:
    patterns of both are redacted, and the smaller one of two limits counts. The section of
    fakevllm.toml is `[privacy]`."""

    @property
    def privacy_or_default(self) -> PrivacySettings:
        """The job's setting `privacy`, or the default if the job does not set it. By default,
        nothing is redacted and everything is kept."""
        return self.privacy or PrivacySettings()

    @property
    def needs_reference(self) -> bool:
        """Whether the job needs the log-probabilities of the reference model, for a KL term or for
        the losses `dpo` and `kto`. The reference model has the weights with which the run
        started."""
        compares = bool(WITH_REFERENCE & {self.loss, self.demonstration_loss})
        return self.kl_loss_coef > 0 or self.use_kl_in_reward or compares

    def as_yaml(self) -> str:
        """Return the job as YAML, without the settings that have their default value.

        An older server refuses settings that it does not know. If such a setting has its default
        value, it is left out, and the older server accepts the job.
        """
        import yaml  # here, because most commands have a job but write no YAML

        return yaml.safe_dump(
            {"job": self.model_dump(mode="json", exclude_defaults=True)}, sort_keys=False
        )

    @model_validator(mode="before")
    @classmethod
    def _resolve_ajet_names(cls, value: Any) -> Any:
        return resolve_kl_loss(merge_target_modules(value))

    if TYPE_CHECKING:  # so that type checkers accept both names as arguments
        lora_target_modules: str = "all-linear"
        use_kl_loss: bool = False
    else:

        @property
        def lora_target_modules(self) -> str:
            """Value of the setting `target_modules`, which AgentJet calls `lora_target_modules`."""
            return self.target_modules

        @property
        def use_kl_loss(self) -> bool:
            """Whether the loss contains a KL term. AgentJet calls this setting `use_kl_loss`."""
            return self.kl_loss_coef > 0

    @staticmethod
    def from_yaml(text: str) -> TrainJob:
        """Read a job from a YAML text, as `parse_job` does, without the warnings."""
        return parse_job(text).job


class ParsedJob(NamedTuple):
    """A training job read from YAML, with warnings about keys that were ignored."""

    job: TrainJob
    warnings: list[str]
    """One line for each value in the YAML that would change training in AgentJet but is ignored."""


def parse_job(text: str) -> ParsedJob:
    """Read a training job from a YAML text. The text must have exactly one of two keys: `job`, or
    `ajet` in AgentJet's form. Raises ValueError with a one-line message if a setting is invalid, or
    if the text does not have exactly one of the keys."""
    raw = parse_job_yaml(text)
    try:
        return ParsedJob(TrainJob.model_validate(raw.settings), raw.warnings)
    except ValidationError as error:
        raise ValueError(describe_errors(error, TrainJob.model_fields, raw.keys)) from None
