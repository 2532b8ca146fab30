"""The loss of a training job. The settings of policy losses have the same names as in verl, and
those of demonstration losses follow TRL."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, get_args

from fakevllm_adapters.job.model import (
    WITH_REFERENCE,
    Aggregation,
    KlType,
    LossUnit,
    TrainJob,
)
from fakevllm_adapters.job.reward_settings import reward_setting_uses

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
UNITS: tuple[str, ...] = get_args(LossUnit)
KL_TYPES: tuple[str, ...] = get_args(KlType)
REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


class LossDefaults(NamedTuple):
    """Default values of a loss's settings. A default applies if the job does not set the
    setting."""

    clip_ratio_low: float
    clip_ratio_high: float
    loss_agg_mode: str


LOSS_DEFAULTS: dict[str, LossDefaults] = {
    "vanilla": LossDefaults(0.2, 0.28, "token-mean"),
    "gspo": LossDefaults(3e-4, 4e-4, "seq-mean-token-mean"),
    "cispo": LossDefaults(10.0, 0.2, "token-mean"),
    "sapo": LossDefaults(0.0, 0.0, "seq-mean-token-mean"),
    "geo_mean": LossDefaults(0.4, 0.4, "seq-mean-token-mean"),
    "gpg": LossDefaults(0.0, 0.0, "token-mean"),
}
_NO_POLICY_LOSS = LossDefaults(0.0, 0.0, "token-mean")
"""Defaults of the policy loss's settings for a demonstration loss that is trained alone. Such a
loss uses none of these settings."""
COUPLED = frozenset({"gspo", "geo_mean"})
"""Losses in which all tokens of a sequence (a call, a chain of calls or an episode) share one
probability ratio."""
WITHOUT_RATIO = frozenset({"gpg"})
"""Losses without a probability ratio."""
WITHOUT_CLIP = frozenset({"sapo", "gpg"})
"""Losses that do not clip."""
DEMONSTRATION_LOSSES = ("sft", "dpo", "kto")
"""Losses of demonstrations (answers to imitate or to avoid). They use neither advantages nor the
log-probabilities of the rollout engine."""
POLICY_ONLY = (
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_unit"),
    *("kl_loss_coef", "kl_loss_type", "entropy_coeff", "bypass_mode", "rollout_is", "rollout_rs"),
    "max_mismatch_k3",
)
"""Settings that only policy losses use."""


class Bounds(NamedTuple):
    """Bounds on a probability ratio or on a divergence. A ratio may have a lower and an upper
    bound. A divergence has only an upper bound."""

    low: float | None
    high: float


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of a training step, with its settings. The loss is a policy loss, a demonstration
    loss, or a policy loss with a demonstration loss as a further term.

    The constructor raises ValueError with a one-line message for a malformed setting, and for
    settings that contradict each other.
    """

    name: str = "vanilla"
    """Name of a policy loss, or of a demonstration loss that is trained alone."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 3.0
    """Bound on the probability ratio where the advantage is negative (dual-clip PPO)."""
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus. A positive weight makes training raise the entropy."""
    loss_agg_mode: str = "token-mean"
    loss_unit: str = "episode"
    """Unit that counts as one sequence: `call`, `episode`, or `timeline` (a chain of an episode's
    calls, in which each call continues the previous one)."""
    loss_scale_factor: float | None = None
    """Divisor of the aggregation `seq-mean-token-sum-norm`. None means the number of tokens of the
    step's longest sequence."""
    tau_pos: float = 1.0
    """sapo's temperature for advantages above 0."""
    tau_neg: float = 1.05
    """sapo's temperature for all other advantages."""
    bypass_mode: bool = True
    """Where the log-probabilities of the old policy come from. If True, the engine has reported
    them with the answers. If False, the trainer computes them."""
    rollout_is: str | None = None
    """Importance sampling, which weights each `token` or `sequence` by the ratio of the trainer's
    probability to the engine's. None means no weights."""
    rollout_is_threshold: str = "2.0"
    """Bounds of the importance weights. With the form `HIGH` (one number), larger weights are
    reduced to this number. With the form `LOW_HIGH` (two numbers), weights outside these bounds are
    set to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether the weights are divided by their mean over the step."""
    rollout_rs: str | None = None
    """Rejection sampling: leave out tokens or sequences for which the probabilities of trainer and
    engine differ too much. The value is a comma-separated list of names from REJECTIONS."""
    rollout_rs_threshold: str | None = None
    """One threshold for all rejection rules, or a comma-separated list with one threshold for each
    rule. A threshold for k1 has the form `LOW_HIGH` or `HIGH`. A threshold for k2 and k3 is a
    maximum."""
    demonstration_loss: str | None = None
    """Name of the demonstration loss that is added to the policy loss `name`."""
    demonstration_loss_coef: float = 1.0
    preference_beta: float = 0.1
    """Factor of the log-ratios to the reference policy in `dpo` and `kto`."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @staticmethod
    def of(job: TrainJob) -> LossSpec:
        """Return the training loss that a job's settings describe.

        Raises ValueError with a one-line message if two settings contradict each other, or if the
        job changes a setting that has no effect in this job.
        """
        defaults = loss_defaults(job.loss)
        _refuse_unread(job, job.loss_agg_mode or defaults.loss_agg_mode)
        return LossSpec(
            name=job.loss,
            clip_ratio_low=_or(job.clip_ratio_low, defaults.clip_ratio_low),
            clip_ratio_high=_or(job.clip_ratio_high, defaults.clip_ratio_high),
            clip_ratio_c=job.clip_ratio_c,
            kl_loss_coef=job.kl_loss_coef,
            kl_loss_type=job.kl_loss_type,
            entropy_coeff=job.entropy_coeff,
            loss_agg_mode=job.loss_agg_mode or defaults.loss_agg_mode,
            loss_unit=job.loss_unit,
            loss_scale_factor=job.loss_scale_factor,
            tau_pos=job.tau_pos,
            tau_neg=job.tau_neg,
            bypass_mode=job.bypass_mode,
            rollout_is=job.rollout_is,
            rollout_is_threshold=job.rollout_is_threshold,
            rollout_is_batch_normalize=job.rollout_is_batch_normalize,
            rollout_rs=job.rollout_rs,
            rollout_rs_threshold=job.rollout_rs_threshold,
            demonstration_loss=job.demonstration_loss,
            demonstration_loss_coef=job.demonstration_loss_coef,
            preference_beta=job.preference_beta,
            desirable_weight=job.desirable_weight,
            undesirable_weight=job.undesirable_weight,
        )

    def __post_init__(self) -> None:
        _one_of("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        _one_of("loss_unit", self.loss_unit, UNITS)
        _one_of("kl_loss_type", self.kl_loss_type, KL_TYPES)
        if self.rollout_is is not None:
            _one_of("rollout_is", self.rollout_is, ("token", "sequence"))
            self._check_weights()
        if self.loss_scale_factor is not None and self.loss_scale_factor <= 0:
            raise ValueError("loss_scale_factor must be above 0")
        if self.demonstration_loss is not None:
            _one_of("demonstration_loss", self.demonstration_loss, DEMONSTRATION_LOSSES)
            if not self.has_policy_loss:
                raise ValueError(
                    f"loss = {self.name} already trains demonstrations: take demonstration_loss "
                    "out, or choose a policy loss such as vanilla"
                )
        _ = self.rollout_is_bounds, self.rejection_bounds

    def _check_weights(self) -> None:
        if self.bypass_mode and self.name not in WITHOUT_RATIO:
            raise ValueError(
                f"rollout_is would weigh the ratio of {self.name} twice: set bypass_mode = false, "
                "or loss = gpg, which has no ratio"
            )
        if self.name == "geo_mean" and self.rollout_is == "token":
            raise ValueError("geo_mean has one ratio for a sequence: set rollout_is = sequence")

    @property
    def has_policy_loss(self) -> bool:
        """Whether the job's loss contains a policy loss. If not, the whole loss is a demonstration
        loss."""
        return self.name not in DEMONSTRATION_LOSSES

    @property
    def of_demonstrations(self) -> str | None:
        """Name of the demonstration loss, or None if the job has none. A demonstration loss is the
        whole loss, or a further term beside a policy loss."""
        return self.demonstration_loss if self.has_policy_loss else self.name

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of the reference policy."""
        return self.kl_loss_coef != 0 or self.of_demonstrations in WITH_REFERENCE

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's loss depends on the other tokens of the same sequence.

        The setting `loss_unit` decides what counts as one sequence, such as a call or an episode.
        If the result is True, the trainer must not split a sequence.
        """
        is_sequence = "seq_" in (self.rollout_rs or "") or self.rollout_is == "sequence"
        return self.name in COUPLED or is_sequence

    @property
    def couples_step(self) -> bool:
        """Whether the loss of each token depends on all other tokens of the training step. This is
        the case if the importance weights are divided by their mean over the step."""
        return self.rollout_is is not None and self.rollout_is_batch_normalize

    @property
    def rollout_is_bounds(self) -> Bounds:
        """Bounds on the importance weights, parsed from `rollout_is_threshold`. Raises ValueError
        if this setting is malformed."""
        return _bounds("rollout_is_threshold", self.rollout_is_threshold)

    @property
    def rejection_bounds(self) -> dict[str, Bounds]:
        """Bounds for each rejection rule in the setting `rollout_rs`, by the rule's name.

        Raises ValueError if `rollout_rs` or `rollout_rs_threshold` is malformed.
        """
        names = _parts(self.rollout_rs or "")
        if not names:
            return {}
        for name in names:
            _one_of("rollout_rs", name, REJECTIONS)
        thresholds = _parts(self.rollout_rs_threshold or "")
        if len(thresholds) not in (1, len(names)):
            raise ValueError("rollout_rs_threshold must be one number, or one for each rollout_rs")
        thresholds *= len(names) // len(thresholds)
        return {
            name: _rejection_bounds(name, threshold)
            for name, threshold in zip(names, thresholds, strict=True)
        }


def loss_defaults(name: str) -> LossDefaults:
    """Return the default settings of the loss `name`. Raises ValueError if the loss is unknown."""
    _one_of("loss", name, (*LOSS_DEFAULTS, *DEMONSTRATION_LOSSES))
    return LOSS_DEFAULTS.get(name, _NO_POLICY_LOSS)


def _refuse_unread(job: TrainJob, loss_agg_mode: str) -> None:
    """Raise ValueError if the job changes a setting that has no effect in this job. A setting is
    changed if its value is not its default."""
    clips = (job.loss not in WITHOUT_CLIP, f"loss = {job.loss} does not clip")
    is_sapo = (job.loss == "sapo", "it is for loss = sapo")
    is_lora = (job.lora_rank > 0, "it is for lora_rank above 0")
    demonstrations = {job.loss, job.demonstration_loss}
    is_kto = ("kto" in demonstrations, "it is for kto")
    uses = reward_setting_uses(job) | {
        "demonstration_loss_coef": (
            job.demonstration_loss is not None,
            "it is for demonstration_loss",
        ),
        "preference_beta": (bool(WITH_REFERENCE & demonstrations), "it is for dpo and kto"),
        "desirable_weight": is_kto,
        "undesirable_weight": is_kto,
        "clip_ratio_low": clips,
        "clip_ratio_high": clips,
        "clip_ratio_c": (job.loss == "vanilla", "it is for loss = vanilla"),
        "tau_pos": is_sapo,
        "tau_neg": is_sapo,
        "loss_scale_factor": (
            loss_agg_mode == "seq-mean-token-sum-norm",
            "it is for loss_agg_mode = seq-mean-token-sum-norm",
        ),
        "lora_alpha": is_lora,
        "target_modules": is_lora,
        "rollout_is_threshold": (job.rollout_is is not None, "it is for rollout_is"),
        "rollout_is_batch_normalize": (job.rollout_is is not None, "it is for rollout_is"),
        "rollout_rs_threshold": (bool(_parts(job.rollout_rs or "")), "it is for rollout_rs"),
    }
    if job.loss in DEMONSTRATION_LOSSES:
        uses |= dict.fromkeys(POLICY_ONLY, (False, f"loss = {job.loss} is no policy loss"))
        if job.use_kl_in_reward:
            del uses["bypass_mode"]
    for setting, (is_used, reason) in uses.items():
        value = getattr(job, setting)
        if not is_used and value != TrainJob.model_fields[setting].default:
            raise ValueError(f"{setting} = {value} would change nothing, {reason}: take it out")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _rejection_bounds(name: str, text: str) -> Bounds:
    bounds = _bounds("rollout_rs_threshold", text)
    if name.endswith("k1"):
        if bounds.low is not None:
            return bounds
        if bounds.high < 1:
            raise ValueError(
                f"rollout_rs_threshold of {name} needs HIGH >= 1, or LOW_HIGH, got {text!r}"
            )
        return Bounds(1 / bounds.high, bounds.high)
    if bounds.low is not None:
        raise ValueError(f"rollout_rs_threshold of {name} is one number, got {text!r}")
    return bounds


def _bounds(setting: str, text: str) -> Bounds:
    """Parse bounds from a text of the form `HIGH` or `LOW_HIGH`.

    The bounds must satisfy 0 < LOW <= HIGH, or 0 < HIGH. Raises ValueError if they do not, or if
    the text has another form. `setting` is the name of the setting for the error message.
    """
    try:
        numbers = [float(part) for part in str(text).split("_")]
        low, high = (None, *numbers) if len(numbers) == 1 else numbers
    except ValueError:
        raise ValueError(f"{setting} must read HIGH or LOW_HIGH, got {text!r}") from None
    if not 0 < (high if low is None else low) <= high:
        raise ValueError(f"{setting} needs 0 < LOW <= HIGH, got {text!r}")
    return Bounds(low, high)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_of(setting: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{setting} must be one of {', '.join(known)}, got {value!r}")
