"""AgentJet's YAML as a stock client sends it: the whole of it, with every default filled in. Pure.

What is read lies below `ajet`; verl's own sections repeat it. A key that is not read and would
change training is told, unless its value is what is done here anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

Settings = dict[str, Any]

KEYS = {
    "project_name": "ajet.project_name",
    "experiment_name": "ajet.experiment_name",
    "experiment_dir": "ajet.experiment_dir",
    "logging": "ajet.trainer_common.logger",
    "train_print_to_markdown_file_path": "ajet.trainer_common.train_print_to_markdown_file_path",
    "val_print_to_markdown_file_path": "ajet.trainer_common.val_print_to_markdown_file_path",
    "backbone": "ajet.backbone",
    "model": "ajet.model.path",
    "n_gpu": "ajet.trainer_common.n_gpus_per_node",
    "batch_size": "ajet.data.train_batch_size",
    "num_repeat": "ajet.rollout.num_repeat",
    "temperature": "ajet.rollout.temperature",
    "swarm_mode": "ajet.enable_swarm_mode",
    "swarm_mode_sample_collection_method": "ajet.swarm_mode_sample_collection_method",
    "max_env_worker": "ajet.rollout.max_env_worker",
    "compute_madness_checklist": "ajet.rollout.compute_madness_checklist",
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
"""Setting of TrainJob -> where AgentJet's YAML has it."""

_OLDER_KEYS = {"use_kl_in_reward": "ajet.trainer_common.algorithm.use_kl_in_reward"}
_NOT_NAMED = {"experiment_dir": "auto", "experiment_name": "read_yaml_name"}
"""Values by which AgentJet means that it shall choose."""
_OF_LORA = ("lora_alpha", "target_modules", "lora_load_format", "layered_summon")
_OF_KL_LOSS = ("kl_loss_coef", "kl_loss_type")
_SHOWN_CHARS = 80
_FROM_ONE = ("save_freq", "mini_batch_num", "total_training_steps")
"""0 or less is AgentJet's word for: not at all."""


class Unread(NamedTuple):
    key: str
    silent: tuple[object, ...]
    """Values that are not worth a word: what is done here anyway, or what AgentJet ships."""
    here: str
    """What counts instead."""


UNREAD = (
    Unread("ajet.rollout.top_p", (1.0,), "a call samples as its client asks"),
    Unread("ajet.rollout.top_k", (-1, 0), "a call samples as its client asks"),
    Unread("ajet.rollout.gamma", (1.0,), "rewards of an episode's calls are not discounted"),
    Unread("ajet.rollout.name", ("vllm",), "the server's --rollout says what samples"),
    Unread("ajet.rollout.force_disable_toolcalls", (False,), "clients choose their tools"),
    Unread("ajet.rollout.multi_turn.max_sample_per_task", (30,), "every call of an episode trains"),
    Unread("ajet.trainer_common.nnodes", (1,), "verl spans the Ray cluster of --trainer-arg"),
    Unread("ajet.trainer_common.loss_extra_scale_ratio", (1.0,), "the loss is not scaled"),
    Unread("ajet.trainer_common.val_before_train", (False,), "nothing is validated"),
    Unread("ajet.trainer_common.val_only", (False,), "nothing is validated"),
    Unread("ajet.trainer_common.kl_penalty_type", ("kl", "k1"), "the KL in the reward is k1"),
    Unread("ajet.trainer_common.optim.optimizer", ("AdamW",), "it is AdamW"),
    Unread("ajet.trainer_common.optim.betas", ([0.9, 0.95],), "they are 0.9 and 0.95"),
    Unread("ajet.trainer_common.optim.lr_scheduler_type", ("constant",), "lr is constant"),
    Unread("ajet.trainer_common.optim.lr_warmup_steps", (-1, 0), "there is no warm-up"),
    Unread("ajet.trainer_common.optim.lr_warmup_steps_ratio", (0.0,), "there is no warm-up"),
    *(
        Unread(
            f"actor_rollout_ref.actor.{key}", silent, "verl's sections are not, a `job:` says it"
        )
        for key, silent in (
            ("policy_loss.loss_mode", ("vanilla",)),
            ("loss_agg_mode", ("token-mean", "seq-mean-token-mean")),
            ("clip_ratio_low", (0.2,)),
            ("clip_ratio_high", (0.2,)),
            ("entropy_coeff", (0,)),
        )
    ),
)
"""Keys that a setting of TrainJob does not stand for."""


def settings_of(whole: Settings) -> tuple[Settings, list[str]]:
    """What the YAML says in our names, and a line for each key that would change training and is
    not read. Raises ValueError, in one line, for what is no job of AgentJet's."""
    if not isinstance(whole.get("ajet"), dict) or not whole["ajet"]:
        raise ValueError("expected a mapping below `ajet`, with all of AgentJet's settings")
    settings = {name: _at(whole, key) for name, key in KEYS.items()}
    for name, key in _OLDER_KEYS.items():
        settings[name] = _at(whole, key) if settings[name] is None else settings[name]
    switched_off = set(_switched_off(whole, settings))
    return (
        {name: value for name, value in settings.items() if name not in switched_off},
        list(_warnings(whole)),
    )


def _switched_off(whole: Settings, settings: Settings) -> Iterator[str]:
    """What the job does not name, or means nothing."""
    for name, value in settings.items():
        is_off = name in _FROM_ONE and isinstance(value, int) and value < 1
        if is_off or value is None or value == _NOT_NAMED.get(name):
            yield name
    if not settings["lora_rank"]:
        yield from _OF_LORA
    if _at(whole, "ajet.trainer_common.use_kl_loss") is False:
        yield from _OF_KL_LOSS


def _warnings(whole: Settings) -> Iterator[str]:
    for key, silent, here in UNREAD:
        value = _at(whole, key)
        if value is not None and value not in silent:
            yield f"{key} = {_shown(value)} is not read: {here}"
    frequency = _at(whole, KEYS["save_freq"])
    if isinstance(frequency, int) and frequency < 1:
        yield f"{KEYS['save_freq']} = {frequency} is not read: checkpoints are always kept"


def _at(whole: Settings, key: str) -> Any:
    """None where there is nothing. Raises ValueError where a section is none."""
    *sections, last = key.split(".")
    here = whole
    for depth, section in enumerate(sections):
        below = here.get(section)
        if below is None:
            return None
        if not isinstance(below, dict):
            raise ValueError(f"expected a mapping below `{'.'.join(sections[: depth + 1])}`")
        here = cast(Settings, below)
    return here.get(last)


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]
