"""What a job and the server's flags contradict is refused in one line, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.config.start_check import check_job, check_start
from fakevllm_server.placement.cluster_section import ClusterSection
from fakevllm_server.web.server_state import ServerState

RUN = Path("runs")
DEMO: dict[str, Any] = {"run_dir": RUN, "model": "demo"}
LOCKSTEP = TrainJob(lockstep=True)
ADAPTERS = TrainJob(lora_rank=8, lr=1e-3)
SLEEP = ClusterSection(gpus_per_node=1, training_gpus=1, colocate="sleep")
NEEDS_EMBEDDED = "job.lockstep needs the embedded engine, .*: start the server with --backend emb"


@pytest.mark.parametrize(
    ("settings", "job", "message"),
    [
        ({"backend": "vllm"}, LOCKSTEP, NEEDS_EMBEDDED),
        ({"backend": "fake"}, LOCKSTEP, NEEDS_EMBEDDED),
        ({"backend": "embedded", "rollout": "vllm"}, LOCKSTEP, NEEDS_EMBEDDED),
        (
            {"backend": "embedded", "replicas": 2},
            LOCKSTEP,
            "job.lockstep needs one engine, and this server has 2 replicas: remove --replicas",
        ),
        (
            {"backend": "vllm", "cluster": SLEEP},
            TrainJob(async_steps=1),
            "job.async_steps lets episodes run beside steps, and with cluster.colocate = .sleep. ",
        ),
        ({"backend": "fake"}, TrainJob(loss="sft"), "The fake engine has no loss sft: use --train"),
        (
            {"backend": "verl", "trainer_args": ["--no-gradient-checkpointing"]},
            TrainJob(gradient_checkpointing=True),
            "job.gradient_checkpointing contradicts --trainer-arg=--no-gradient-checkpointing: ",
        ),
        (
            {"backend": "vllm", "engine_args": ["--enable-lora"]},
            TrainJob(),
            "vLLM with --enable-lora takes adapters .*: set lora_rank in the job, or leave ",
        ),
        (
            {"backend": "vllm", "engine_args": ["--enable-lora"]},
            TrainJob(lora_rank=1000),
            "vLLM holds adapters up to rank 512, and lora_rank is 1000: lower lora_rank, or ",
        ),
        (
            {"backend": "embedded", "model": None},
            TrainJob(),
            "No model is set: start the server with --model DIR ",
        ),
        (
            {"backend": "embedded", "model": None},
            TrainJob(model="missing"),
            "The model folder 'missing' does not exist",
        ),
    ],
)
def test_a_job_that_the_server_cannot_run_is_refused_before_it_starts(
    settings: dict[str, Any], job: TrainJob, message: str
) -> None:
    config = ServerConfig(**(DEMO | settings))
    check_start(config, None, {})  # jobs come later
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        check_start(config, job, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "job"),
    [
        ({"backend": "embedded"}, LOCKSTEP),
        ({"backend": "embedded", "replicas": 2}, TrainJob()),
        ({"backend": "embedded"}, TrainJob(loss="sft")),
        ({"backend": "vllm", "cluster": SLEEP}, TrainJob()),
        (
            {"backend": "vllm", "cluster": replace(SLEEP, colocate="shared")},
            TrainJob(async_steps=1),
        ),
        ({"backend": "vllm", "engine_args": ["--enable-lora"]}, ADAPTERS),
        ({"backend": "verl"}, TrainJob(gradient_checkpointing=True)),
    ],
)
def test_a_job_that_the_server_can_run_is_accepted(settings: dict[str, Any], job: TrainJob) -> None:
    check_start(ServerConfig(**(DEMO | settings)), job, {})


def test_the_engines_load_the_model_of_the_flag_or_of_the_job(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    folder = str(tmp_path)
    assert check_job(ServerConfig("embedded", RUN, model=folder), TrainJob(model="x")) == folder
    assert check_job(ServerConfig("embedded", RUN), TrainJob(model=folder)) == folder
    assert check_job(ServerConfig("fake", RUN), TrainJob(model="x")) is None


async def test_a_job_that_arrives_later_is_checked_before_an_engine_starts(tmp_path: Path) -> None:
    state = ServerState(ServerConfig("embedded", tmp_path / "run", model="demo", replicas=2))
    state.job = LOCKSTEP
    async with state.engine_lock:
        with pytest.raises(ConfigError, match=r"^job\.lockstep needs one engine"):
            await state.start_engine()
    assert not list((tmp_path / "run").rglob("*.log"))
    await state.close()
