"""Check that the section `cluster` fits the engines of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.vllm.command import has_lora_flag, parse_flags
from fakevllm_server.placement.cluster_section import ClusterSection

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

PLACED_BY_SECTION = {
    "tensor-parallel-size": "tensor_parallel",
    "data-parallel-size": "data_parallel",
    "pipeline-parallel-size": "tensor_parallel",
}
"""Arguments of vLLM that would use other GPUs than the section says, each with the key to use."""
SHORT_FLAGS = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
}
TRAINER_ARGUMENTS = {
    "num-workers": "set cluster.training_gpus instead",
    "min-workers": "set cluster.min_training_gpus instead",
    "ray-address": "set cluster.nodes and cluster.ray_address instead",
}
"""Arguments of the verl trainer that contradict the section, with the remedy."""


def check_engines(config: ServerConfig, cluster: ClusterSection) -> None:
    """Raise ConfigError if the engines of the server cannot be placed as the section says."""
    rollout, trainer = config.rollout_name, config.trainer_name
    if "fake" in (rollout, trainer):
        raise ConfigError(
            "The section cluster is for GPUs, and the fake engine has none: remove it."
        )
    if config.rollout_url is not None:
        raise ConfigError(
            "cluster places the vLLM that this server starts, and --rollout-url names one that "
            "runs: remove one of them."
        )
    if trainer == "embedded" and cluster.training_gpus > 1:
        raise ConfigError(
            f"cluster.training_gpus is {cluster.training_gpus}, and the embedded trainer uses one "
            "GPU: set it to 1, or use --trainer verl."
        )
    if trainer == "embedded" and cluster.nodes > 1:
        raise ConfigError(
            f"cluster.nodes is {cluster.nodes}, and the embedded trainer runs on one machine: set "
            "it to 1, or use --trainer verl."
        )
    if rollout == "embedded" and cluster.replica_gpus > 1:
        raise ConfigError(
            f"cluster gives {cluster.replica_gpus} GPUs to the embedded engine, which samples on "
            "one: set tensor_parallel and data_parallel to 1, or use --rollout vllm."
        )
    if rollout == trainer and cluster.replicas == 1 and cluster.colocate != "shared":
        raise ConfigError(
            "The embedded engine samples and trains on the same GPU: set cluster.colocate to "
            '"shared", or use --backend vllm.'
        )
    if cluster.colocate == "sleep" and has_lora_flag(config.engine_args):
        raise ConfigError(
            'cluster.colocate = "sleep" needs whole weights after each step, and a vLLM with '
            "--engine-arg=--enable-lora takes adapters: remove one of them."
        )
    if cluster.colocate == "sleep" and cluster.replicas > 1:
        raise ConfigError(
            'cluster.colocate = "sleep" puts one vLLM to sleep, and cluster.replicas is '
            f"{cluster.replicas}: set replicas to 1, or use another division."
        )
    _refuse_arguments(config)


def _refuse_arguments(config: ServerConfig) -> None:
    """Raise ConfigError for arguments of the engines that contradict the section."""
    flags = [SHORT_FLAGS.get(flag, flag) for flag in parse_flags(config.engine_args)]
    short = [part.partition("=")[0] for part in config.engine_args]
    flags += [SHORT_FLAGS[name] for name in short if name in SHORT_FLAGS]
    for flag in flags:
        if flag in PLACED_BY_SECTION:
            raise ConfigError(
                f"--engine-arg=--{flag} contradicts the section cluster: set "
                f"cluster.{PLACED_BY_SECTION[flag]} instead."
            )
    for flag in parse_flags(config.trainer_args):
        if flag in TRAINER_ARGUMENTS:
            raise ConfigError(
                f"--trainer-arg=--{flag} contradicts the section cluster: "
                f"{TRAINER_ARGUMENTS[flag]}."
            )
