"""Which policy loss, with its settings, by verl's names. Wrong ones are told when it is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, get_args

from fakevllm_adapters.job.model import Aggregation, KlType, LossUnit, TrainJob
from fakevllm_adapters.job.rewards import read_rewards

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


class Own(NamedTuple):
    """What a loss takes where nothing is set."""

    clip_ratio_low: float
    clip_ratio_high: float
    loss_agg_mode: str


OWN: dict[str, Own] = {
    "vanilla": Own(0.2, 0.28, "token-mean"),
    "gspo": Own(3e-4, 4e-4, "seq-mean-token-mean"),
    "cispo": Own(10.0, 0.2, "token-mean"),
    "sapo": Own(0.0, 0.0, "seq-mean-token-mean"),
    "geo_mean": Own(0.4, 0.4, "seq-mean-token-mean"),
    "gpg": Own(0.0, 0.0, "token-mean"),
}
COUPLED = frozenset({"gspo", "geo_mean"})
"""One ratio for all tokens of a unit."""
WITHOUT_RATIO = frozenset({"gpg"})
WITHOUT_CLIP = frozenset({"sapo", "gpg"})


class Bounds(NamedTuple):
    """Of a probability ratio, or of a divergence (then without `low`)."""

    low: float | None
    high: float


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Raises ValueError, in one line, for settings that contradict each other."""

    name: str = "vanilla"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the ratio where the advantage is negative."""
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    """Weight of the entropy, which is to grow."""
    loss_agg_mode: str = "token-mean"
    loss_unit: str = "episode"
    """What counts as one sequence."""
    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`; None is the longest unit of the step."""
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    """sapo's temperatures, for advantages above 0 and for all others."""
    bypass_mode: bool = True
    """The engine's log-probabilities are the old policy's. Off, the trainer computes its own."""
    rollout_is: str | None = None
    """Weigh tokens by how far trainer and engine differ: `token` or `sequence`."""
    rollout_is_threshold: str = "2.0"
    """Largest weight; `low_high` makes weights outside 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Those weights are divided by their mean over the step."""
    rollout_rs: str | None = None
    """Leave out tokens or sequences where trainer and engine differ too much: some of REJECTIONS,
    with commas."""
    rollout_rs_threshold: str | None = None
    """One for all, or one for each, with commas: `low_high` for k1, the most for k2 and k3."""

    @staticmethod
    def of(job: TrainJob) -> LossSpec:
        """Refuses settings that nothing would read, too."""
        own = own_settings(job.loss)
        _refuse_unread(job, job.loss_agg_mode or own.loss_agg_mode)
        return LossSpec(
            name=job.loss,
            clip_ratio_low=_or(job.clip_ratio_low, own.clip_ratio_low),
            clip_ratio_high=_or(job.clip_ratio_high, own.clip_ratio_high),
            clip_ratio_c=job.clip_ratio_c,
            kl_loss_coef=job.kl_loss_coef,
            kl_loss_type=job.kl_loss_type,
            entropy_coeff=job.entropy_coeff,
            loss_agg_mode=job.loss_agg_mode or own.loss_agg_mode,
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
        _ = self.is_bounds, self.rejections

    def _check_weights(self) -> None:
        if self.bypass_mode and self.name not in WITHOUT_RATIO:
            raise ValueError(
                f"rollout_is would weigh the ratio of {self.name} twice: set bypass_mode = false, "
                "or loss = gpg, which has no ratio"
            )
        if self.name == "geo_mean" and self.rollout_is == "token":
            raise ValueError("geo_mean has one ratio for a sequence: set rollout_is = sequence")

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's loss depends on others of its unit, which then has to be whole."""
        is_sequence = "seq_" in (self.rollout_rs or "") or self.rollout_is == "sequence"
        return self.name in COUPLED or is_sequence

    @property
    def couples_step(self) -> bool:
        """Whether a token's loss depends on all others of the step."""
        return self.rollout_is is not None and self.rollout_is_batch_normalize

    @property
    def is_bounds(self) -> Bounds:
        return _bounds("rollout_is_threshold", self.rollout_is_threshold)

    @property
    def rejections(self) -> dict[str, Bounds]:
        """Each of `rollout_rs` with its own threshold."""
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


def own_settings(name: str) -> Own:
    """Raises ValueError for a loss nobody knows."""
    _one_of("loss", name, OWN)
    return OWN[name]


def _refuse_unread(job: TrainJob, loss_agg_mode: str) -> None:
    """Raises ValueError for a setting that differs from its default and would change nothing."""
    clips = (job.loss not in WITHOUT_CLIP, f"loss = {job.loss} does not clip")
    is_sapo = (job.loss == "sapo", "it is for loss = sapo")
    is_lora = (job.lora_rank > 0, "it is for lora_rank above 0")
    read = read_rewards(job) | {
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
    for setting, (is_read, why) in read.items():
        value = getattr(job, setting)
        if not is_read and value != TrainJob.model_fields[setting].default:
            raise ValueError(f"{setting} = {value} would change nothing, {why}: take it out")


def _or(value: float | None, own: float) -> float:
    return own if value is None else value


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
    """From `high` or `low_high`."""
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
