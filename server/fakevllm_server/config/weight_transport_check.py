"""Check that the weight transport `vllm` fits the engines of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.vllm.command import has_lora_flag, parse_flags

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

REMEDY = "remove it, so that new weights pass through a folder"


def check_transport(config: ServerConfig) -> None:
    """Raise ConfigError if new weights cannot be sent to vLLM without a folder."""
    cluster = config.cluster
    shares_some = cluster is not None and cluster.is_colocated and cluster.rollout_gpus > 1
    reasons = {
        f"needs --rollout vllm, and the rollout engine is {config.rollout_name}": (
            config.rollout_name != "vllm"
        ),
        "works only with the vLLM that this server starts, because its routes check no key and "
        "unpickle data, and --rollout-url names another one": config.rollout_url is not None,
        f"needs --trainer embedded, because the workers of {config.trainer_name} do not send "
        "their weights to vLLM": config.trainer_name != "embedded",
        "sends whole weights, and a vLLM with --engine-arg=--enable-lora takes adapters": (
            has_lora_flag(config.engine_args)
        ),
        "chooses vLLM's weight transfer engine itself, which contradicts "
        "--engine-arg=--weight-transfer-config": (
            "weight-transfer-config" in parse_flags(config.engine_args)
        ),
        f"reaches one vLLM, and this server has {config.num_replicas} replicas": (
            config.num_replicas > 1
        ),
        "cannot send to several GPUs of which one trains, as cluster.colocate says": shares_some,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"--weight-transport {config.weight_transport} {reason}: {REMEDY}.")
