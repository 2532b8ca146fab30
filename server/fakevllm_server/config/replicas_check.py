"""Check the settings for several rollout replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.vllm.remote_url import base_url
from fakevllm_server.placement.cluster_section import VISIBLE_GPUS

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

MAX_REPLICAS = 64
"""Maximum number of replicas. One server process relays the calls of all of them."""
DEVICES = Path("/dev")
"""Folder in which the driver of NVIDIA GPUs has one file for each GPU."""


def check_replicas(config: ServerConfig) -> None:
    """Raise ConfigError if the settings for replicas contradict each other."""
    urls, number = config.rollout_urls, config.replicas
    if not 1 <= number <= MAX_REPLICAS:
        raise ConfigError(f"--replicas must be 1 to {MAX_REPLICAS}, got {number}.")
    if urls and number > 1:
        raise ConfigError(
            "--replicas is for engines that this server starts, and --rollout-url names engines "
            "that run: remove --replicas, and give --rollout-url once for each engine."
        )
    bare = [base_url(url) for url in urls]
    twice = next((url for url in bare if bare.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--rollout-url {twice} is given twice: give each engine once, or remove one of them."
        )
    if config.cluster is not None and number not in (1, config.cluster.replicas):
        raise ConfigError(
            f"--replicas is {number}, and cluster.replicas is {config.cluster.replicas}: set only "
            "cluster.replicas, which gives each replica its own GPUs."
        )


def check_gpus(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if several replicas would be started on the same GPU. `environ` are the
    environment variables of the server."""
    is_placed = config.cluster is not None or config.rollout_urls or config.rollout_name == "fake"
    if config.num_replicas == 1 or is_placed or _is_on_cpu(config):
        return
    if _has_gpus(environ):
        number = config.num_replicas
        raise ConfigError(
            f"--replicas {number} would start all replicas on the same GPU: add a section cluster "
            f"with replicas = {number}, which gives each replica its own GPUs."
        )


def _is_on_cpu(config: ServerConfig) -> bool:
    arguments = " ".join(config.engine_args)
    return "--device=cpu" in arguments or "--device cpu" in arguments


def _has_gpus(environ: Mapping[str, str]) -> bool:
    listed = environ.get(VISIBLE_GPUS)
    if listed is not None and not listed.strip():
        return False
    return any(DEVICES.glob("nvidia[0-9]*"))
