"""Read the settings of a training job from the YAML of AgentJet, a framework for training agents.

An unmodified AgentJet client sends its whole configuration, with every default filled in. Only the
section `ajet` is read, because the sections for verl repeat the values of `ajet`. Some keys change
training in AgentJet, but are not read here. Such a key causes a warning, unless its value is
AgentJet's default or describes what fakevllm does anyway. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

Settings = dict[str, Any]

AJET_KEYS = {
    "project_name": "ajet.project_name",
    "experiment_name": "ajet.experiment_name",
    "experiment_dir": "ajet.experiment_dir",
    "logging": "ajet.trainer_common.logger",
    "train_print_to_markdown_file_path": "ajet.trainer_common.train_print_to_markdown_file_path",
    "val_print_to_markdown_file_path": "ajet.trainer_common.val_print_to_markdown_file_path",
    "backbone": "ajet.backbone",
    "model": "ajet.model.path",
    "n_gpu": "ajet.trainer_common.n_gpus_per_node",
    "nnodes": "ajet.trainer_common.nnodes",
    "batch_size": "ajet.data.train_batch_size",
    "num_repeat": "ajet.rollout.num_repeat",
    "temperature": "ajet.rollout.temperature",
    "swarm_mode": "ajet.enable_swarm_mode",
    "swarm_mode_sample_collection_method": "ajet.swarm_mode_sample_collection_method",
    "max_env_worker": "ajet.rollout.max_env_worker",
    "compute_madness_checklist": "ajet.rollout.compute_madness_checklist",
    "timeline_compare_level": (
        "ajet.context_tracker.timeline_merging_policy.timeline_compare_level"
    ),
    "max_prompt_length": "ajet.data.max_prompt_length",
    "max_response_length": "ajet.data.max_response_length",
    "max_response_length_in_one_turn": "ajet.rollout.max_response_length_in_one_turn",
    "max_model_len": "ajet.rollout.max_model_len",
    "gpu_memory_utilization": "ajet.rollout.gpu_memory_utilization",
    "max_num_seqs": "ajet.rollout.max_num_seqs",
    "tensor_model_parallel_size": "ajet.rollout.tensor_model_parallel_size",
    "ulysses_sequence_parallel_size": "ajet.trainer_common.ulysses_sequence_parallel_size",
    "algorithm": "ajet.trainer_common.algorithm.adv_estimator",
    "use_kl_in_reward": "ajet.trainer_common.use_kl_in_reward",
    "kl_penalty_type": "ajet.trainer_common.kl_penalty_type",
    "kl_loss_coef": "ajet.trainer_common.kl_loss_coef",
    "kl_loss_type": "ajet.trainer_common.kl_loss_type",
    "lr": "ajet.trainer_common.optim.lr",
    "weight_decay": "ajet.trainer_common.optim.weight_decay",
    "grad_clip": "ajet.trainer_common.optim.grad_clip",
    "ppo_epochs": "ajet.trainer_common.ppo_epochs",
    "mini_batch_num": "ajet.trainer_common.mini_batch_num",
    "save_freq": "ajet.trainer_common.save_freq",
    "total_training_steps": "ajet.trainer_common.total_training_steps",
    "lora_rank": "ajet.lora.lora_rank",
    "lora_alpha": "ajet.lora.lora_alpha",
    "target_modules": "ajet.lora.target_modules",
    "lora_load_format": "ajet.lora.load_format",
    "layered_summon": "ajet.lora.layered_summon",
}
"""The key in AgentJet's YAML for each setting of TrainJob."""

_USE_KL_LOSS = "use_kl_loss"
USE_KL_LOSS_KEY = "ajet.trainer_common.use_kl_loss"
OLDER_KEYS = {
    "use_kl_in_reward": "ajet.trainer_common.algorithm.use_kl_in_reward",
    "timeline_compare_level": "ajet.context_tracker.timeline_compare_level",
}
"""Keys that older versions of AgentJet use for a setting."""
_NOT_SET = {
    "experiment_dir": "auto",
    "experiment_name": "read_yaml_name",
    "timeline_compare_level": "text",
}
"""Maps some settings to a value with which the setting counts as absent. There are two kinds of
such values: values that let AgentJet choose, and defaults of AgentJet, which are in every job of
AgentJet."""
_LORA_SETTINGS = ("lora_alpha", "target_modules", "lora_load_format", "layered_summon")
_SHOWN_CHARS = 80
_POSITIVE_SETTINGS = ("save_freq", "mini_batch_num", "total_training_steps")
"""Settings that AgentJet switches off if their value is 0 or less."""


class IgnoredKey(NamedTuple):
    """A key of AgentJet's YAML that would change training in AgentJet but is not read here."""

    key: str
    silent: tuple[object, ...]
    """Values that cause no warning: those that describe what fakevllm does anyway, and AgentJet's
    defaults."""
    instead: str
    """Text for the warning. It says what fakevllm does instead of reading the key."""


IGNORED_KEYS = (
    IgnoredKey("ajet.rollout.top_p", (1.0,), "each request sets its own sampling"),
    IgnoredKey("ajet.rollout.top_k", (-1, 0), "each request sets its own sampling"),
    IgnoredKey("ajet.rollout.gamma", (1.0,), "rewards of an episode's calls are not discounted"),
    IgnoredKey("ajet.rollout.name", ("vllm",), "the server's --rollout selects the engine"),
    IgnoredKey("ajet.rollout.force_disable_toolcalls", (False,), "clients choose their tools"),
    IgnoredKey(
        "ajet.rollout.multi_turn.max_sample_per_task", (30,), "every call of an episode trains"
    ),
    IgnoredKey("ajet.trainer_common.loss_extra_scale_ratio", (1.0,), "the loss is not scaled"),
    IgnoredKey("ajet.trainer_common.val_before_train", (False,), "nothing is validated"),
    IgnoredKey("ajet.trainer_common.val_only", (False,), "nothing is validated"),
    IgnoredKey("ajet.trainer_common.optim.optimizer", ("AdamW",), "the optimizer is AdamW"),
    IgnoredKey("ajet.trainer_common.optim.betas", ([0.9, 0.95],), "betas are 0.9 and 0.95"),
    IgnoredKey("ajet.trainer_common.optim.lr_scheduler_type", ("constant",), "lr is constant"),
    IgnoredKey("ajet.trainer_common.optim.lr_warmup_steps", (-1, 0), "there is no warm-up"),
    IgnoredKey("ajet.trainer_common.optim.lr_warmup_steps_ratio", (0.0,), "there is no warm-up"),
    *(
        IgnoredKey(f"actor_rollout_ref.actor.{key}", silent, "only the section `ajet` is read")
        for key, silent in (
            ("policy_loss.loss_mode", ("vanilla",)),
            ("loss_agg_mode", ("token-mean", "seq-mean-token-mean")),
            ("clip_ratio_low", (0.2,)),
            ("clip_ratio_high", (0.2,)),
            ("entropy_coeff", (0,)),
        )
    ),
)
"""Keys for which a job has no setting. They are ignored, with a warning unless the value is one of
those that cause no warning."""


def read_ajet_settings(whole: Settings) -> tuple[Settings, list[str]]:
    """Return the settings in AgentJet's YAML under the names of TrainJob's fields, and a list of
    warnings.

    There is one warning for each key that is not read although its value would change training in
    AgentJet. Raises ValueError with a one-line message if the YAML is not an AgentJet job.
    """
    if not isinstance(whole.get("ajet"), dict) or not whole["ajet"]:
        raise ValueError("expected a mapping below `ajet`, with all of AgentJet's settings")
    keys = {**AJET_KEYS, _USE_KL_LOSS: USE_KL_LOSS_KEY}
    settings = {name: _at(whole, key) for name, key in keys.items()}
    for name, key in OLDER_KEYS.items():
        settings[name] = _at(whole, key) if settings[name] is None else settings[name]
    switched_off = set(_switched_off(whole, settings))
    return (
        {name: value for name, value in settings.items() if name not in switched_off},
        list(_warnings(whole)),
    )


def _switched_off(whole: Settings, settings: Settings) -> Iterator[str]:
    """Yield the names of settings whose value in the YAML must not be used.

    There are four kinds of such values: null, a value in `_NOT_SET`, a value that switches the
    setting off, and any value of a LoRA setting while LoRA is off.
    """
    for name, value in settings.items():
        is_off = name in _POSITIVE_SETTINGS and isinstance(value, int) and value < 1
        if is_off or value is None or value == _NOT_SET.get(name):
            yield name
    if not settings["lora_rank"]:
        yield from _LORA_SETTINGS


def _warnings(whole: Settings) -> Iterator[str]:
    for key, silent, instead in IGNORED_KEYS:
        value = _at(whole, key)
        if value is not None and value not in silent:
            yield f"{key} = {_shown(value)} is not read: {instead}"
    frequency = _at(whole, AJET_KEYS["save_freq"])
    if isinstance(frequency, int) and frequency < 1:
        yield f"{AJET_KEYS['save_freq']} = {frequency} is not read: checkpoints are always kept"


def _at(whole: Settings, key: str) -> Any:
    """Return the value at a key with dots, such as `ajet.model.path`. Return None if there is no
    such key.

    Raises ValueError if a section in the key is not a mapping.
    """
    *sections, last = key.split(".")
    mapping = whole
    for depth, section in enumerate(sections):
        below = mapping.get(section)
        if below is None:
            return None
        if not isinstance(below, dict):
            raise ValueError(f"expected a mapping below `{'.'.join(sections[: depth + 1])}`")
        mapping = cast(Settings, below)
    return mapping.get(last)


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]
