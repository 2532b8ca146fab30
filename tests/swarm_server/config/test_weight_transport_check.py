"""The flag `--weight-transport`: what cannot send weights to vLLM is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.engine_specs import engine_specs
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.config.start_check import check_start
from fakevllm_server.placement.cluster_section import ClusterSection

SLEEP = ClusterSection(gpus_per_node=1, training_gpus=1, colocate="sleep")
ON_VLLM: dict[str, Any] = {"backend": "vllm", "run_dir": Path("run"), "weight_transport": "vllm"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"backend": "embedded"}, "needs --rollout vllm, and the rollout engine is embedded"),
        ({"backend": "fake"}, "needs --rollout vllm, and the rollout engine is fake"),
        (
            {"backend": "verl", "trainer_args": ["--ray-address=head:6379"]},
            "needs verl's workers on vLLM's machine, and in the cluster of --trainer-arg=--ray-add",
        ),
        (
            {
                "backend": "verl",
                "cluster": ClusterSection(
                    gpus_per_node=2, training_gpus=2, nodes=2, ray_address="head:6379"
                ),
            },
            r"needs verl's workers on vLLM's machine, and with cluster\.nodes = 2 they may be on",
        ),
        ({"rollout_url": "http://gpu:8000"}, "works only with the vLLM that this server starts"),
        ({"replicas": 2}, "reaches one vLLM, and this server has 2 replicas"),
        ({"engine_args": ["--enable-lora"]}, "sends whole weights, and a vLLM with --engine-arg="),
        (
            {"engine_args": ['--weight-transfer-config={"backend": "nccl"}']},
            "chooses vLLM's weight transfer engine itself",
        ),
        (
            {"cluster": ClusterSection(gpus_per_node=4, training_gpus=1, replicas=2)},
            "reaches one vLLM, and this server has 2 replicas",
        ),
        (
            {
                "cluster": ClusterSection(
                    gpus_per_node=2, training_gpus=1, tensor_parallel=2, colocate="shared"
                )
            },
            "cannot send to several GPUs of which some train",
        ),
    ],
)
def test_a_transfer_that_cannot_work_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^--weight-transport vllm {reason}.*: remove it"):
        ServerConfig(**(ON_VLLM | settings))


def test_verls_workers_send_from_the_cluster_that_the_server_starts() -> None:
    config = ServerConfig("verl", Path("run"), weight_transport="vllm")
    check_start(config, None, {})
    with pytest.raises(ConfigError, match=r"in the cluster of RAY_ADDRESS .*: unset RAY_ADDRESS, "):
        check_start(config, None, {"RAY_ADDRESS": "head:6379"})
    check_start(ServerConfig(**ON_VLLM), None, {"RAY_ADDRESS": "head:6379"})
    check_start(replace(config, weight_transport="folder"), None, {"RAY_ADDRESS": "head:6379"})


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--weight-transport must be one of folder, vllm, got 'x"):
        ServerConfig("vllm", Path("run"), weight_transport="x")


def test_adapters_and_sleep_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match='colocate = "sleep" needs whole weights after each step'):
        ServerConfig("vllm", Path("run"), cluster=SLEEP, engine_args=["--enable-lora"])


def test_several_replicas_and_sleep_contradict_each_other() -> None:
    cluster = replace(SLEEP, gpus_per_node=2, replicas=2)
    with pytest.raises(
        ConfigError, match=r"to sleep, and cluster\.replicas is 2: set replicas to 1"
    ):
        ServerConfig("vllm", Path("run"), cluster=cluster)


@pytest.mark.parametrize(
    ("cluster", "shares_gpu", "sleeps"),
    [
        (None, True, False),
        (ClusterSection(gpus_per_node=2, training_gpus=1), False, False),
        (ClusterSection(gpus_per_node=1, training_gpus=1, colocate="shared"), True, False),
        (SLEEP, True, True),
        (replace(SLEEP, gpus_per_node=2, training_gpus=2), True, True),
    ],
)
def test_the_engines_are_started_as_the_settings_say(
    tmp_path: Path, cluster: ClusterSection | None, shares_gpu: bool, sleeps: bool
) -> None:
    backend = "verl" if cluster is not None and cluster.training_gpus > 1 else "vllm"
    config = ServerConfig(backend, tmp_path, model="demo", cluster=cluster, weight_transport="vllm")
    (rollout,), trainer = engine_specs(config, TrainJob())
    assert (rollout.weight_transport, rollout.shares_gpu) == ("vllm", shares_gpu)
    assert (rollout.sleeps, trainer.train_only) == (sleeps, True)
