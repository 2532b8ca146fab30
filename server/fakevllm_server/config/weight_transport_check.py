"""Check that the weight transport `vllm` fits the engines of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.process.weight_transports import FOLDER
from fakevllm_server.backends.vllm.command import has_lora_flag, parse_flags

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

NEEDS_FIRST_MACHINE = "needs verl's workers on vLLM's machine, and"
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
        "cannot send to several GPUs of which some train, as cluster.colocate says": shares_some,
        f"{NEEDS_FIRST_MACHINE} with cluster.nodes = {0 if cluster is None else cluster.nodes} "
        "they may be on another one": cluster is not None and cluster.nodes > 1,
        f"{NEEDS_FIRST_MACHINE} in the cluster of --trainer-arg=--ray-address they may be on "
        "another one": "ray-address" in parse_flags(config.trainer_args),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"--weight-transport {config.weight_transport} {reason}: {REMEDY}.")


def check_ray_address(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if verl's workers run in a Ray cluster that the environment names, and
    cannot send their weights for this reason. `environ` are the environment variables of the
    server."""
    is_sent = config.weight_transport != FOLDER and config.trainer_name == "verl"
    if is_sent and environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"--weight-transport {config.weight_transport} {NEEDS_FIRST_MACHINE} in the cluster of "
            f"RAY_ADDRESS they may be on another one: unset RAY_ADDRESS, or {REMEDY}."
        )
