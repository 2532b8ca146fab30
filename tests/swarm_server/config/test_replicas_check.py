"""Settings for several rollout replicas that contradict each other are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fakevllm_server.cli.main import app
from fakevllm_server.config import replicas_check
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.config.start_check import check_start
from fakevllm_server.placement.cluster_section import ClusterSection

RUN = Path("runs")
TWO = ClusterSection(gpus_per_node=4, training_gpus=1, replicas=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "--replicas must be 1 to 64, got 0"),
        ({"replicas": 65}, "--replicas must be 1 to 64, got 65"),
        (
            {"replicas": 2, "rollout_url": "http://gpu:1"},
            "--replicas is for engines that this server starts, and --rollout-url names engines",
        ),
        (
            {"rollout_url": "http://gpu:1", "more_rollout_urls": ["http://gpu:1/v1"]},
            "--rollout-url http://gpu:1 is given twice",
        ),
        (
            {"rollout_url": "http://gpu:1", "more_rollout_urls": ["gpu:2"]},
            "--rollout-url must be http://HOST:PORT",
        ),
        ({"replicas": 3, "cluster": TWO}, "--replicas is 3, and cluster.replicas is 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        ServerConfig("vllm", RUN, **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas abc", "Error: Invalid value for '--replicas': 'abc' is not a valid int"),
        ("--replicas 2.5", "Error: Invalid value for '--replicas': '2.5' is not a valid int"),
        ("--replicas 0", "fakevllm-server: --replicas must be 1 to 64, got 0."),
        ("--replicas -1", "fakevllm-server: --replicas must be 1 to 64, got -1."),
        (
            "--replicas 2 --backend vllm --rollout-url http://gpu:1",
            "fakevllm-server: --replicas is for engines that this server starts, and --rollout-url "
            "names engines that run: remove --replicas, and give --rollout-url once for each eng",
        ),
    ],
)
def test_a_wrong_number_of_replicas_on_the_command_line_is_named_in_the_last_line(
    flags: str, message: str
) -> None:
    result = CliRunner().invoke(app, ["start", "--check", *flags.split()])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(message)


def test_more_replicas_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster needs 5 GPUs .* lower .* or replicas"):
        ClusterSection(gpus_per_node=4, training_gpus=1, replicas=4)


def test_the_number_of_replicas_comes_from_the_urls_the_flag_or_the_section() -> None:
    assert ServerConfig("vllm", RUN).num_replicas == 1
    assert ServerConfig("vllm", RUN, replicas=3).num_replicas == 3
    assert ServerConfig("vllm", RUN, cluster=TWO).num_replicas == 2
    urls = ["http://gpu:2", "http://gpu:3"]
    config = ServerConfig("vllm", RUN, rollout_url="http://gpu:1", more_rollout_urls=urls)
    assert config.num_replicas == 3


def test_with_replicas_the_trainer_has_a_process_of_its_own() -> None:
    ServerConfig("embedded", RUN, replicas=2, trainer_args=["--device=cpu"])
    with pytest.raises(ConfigError, match="one process samples and trains"):
        ServerConfig("embedded", RUN, trainer_args=["--device=cpu"])


def test_replicas_without_a_section_are_refused_on_a_machine_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_check, "DEVICES", tmp_path)
    config = ServerConfig("vllm", RUN, replicas=2)
    check_start(config, None, {})
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ConfigError, match="--replicas 2 would start all replicas on the same GPU"):
        check_start(config, None, {})
    check_start(config, None, {"CUDA_VISIBLE_DEVICES": ""})
    check_start(ServerConfig("vllm", RUN), None, {})
    check_start(ServerConfig("fake", RUN, replicas=2), None, {})
    check_start(
        ServerConfig("embedded", RUN, replicas=2, engine_args=["--device", "cpu"]), None, {}
    )
