"""The engine's process and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from swarm_server.backends.embedded.engine_helpers import SPEC, random_calls

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.types.backend import BackendRefused, Batch
from fakevllm_server.types.engine_spec import EngineSpec

pytestmark = pytest.mark.slow

MODULE = "fakevllm_server.backends.embedded"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def arguments(model: Path, run_dir: Path) -> list[str]:
    paths = ["--socket", str(run_dir / "s"), "--run-dir", str(run_dir), "--model", str(model)]
    return [sys.executable, "-m", MODULE, "--served-model-name", "demo", "--seed", "0", *paths]


def test_help_loads_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['x', '--help']\n"
        "from fakevllm_server.backends.embedded.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, env=ENVIRONMENT
    )

    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


def test_an_unusable_model_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    command = arguments(tmp_path / "missing", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=ENVIRONMENT)

    assert done.returncode == 2
    assert done.stderr == (
        f"model folder {tmp_path / 'missing'} does not exist: "
        "give --model a folder in Hugging Face form\n"
    )


def test_lockstep_refuses_several_sequences_at_a_time(tmp_path: Path) -> None:
    command = [*arguments(tmp_path, tmp_path), "--max-num-seqs=8", "--lockstep"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=ENVIRONMENT)

    assert done.returncode == 2
    assert done.stderr.endswith("decodes one answer at a time: not with --max-num-seqs\n")


async def test_the_server_starts_uses_and_stops_the_process(
    demo_folder: Path, tmp_path: Path
) -> None:
    backend = ChildEngine(EngineSpec("embedded", tmp_path, str(demo_folder), "demo"))
    try:
        endpoint = await backend.launch()
        await backend.boot(TrainJob(max_mismatch_k3=None))  # the calls are made up
        metrics = await backend.step(Batch(1, random_calls(2)), SPEC)
        await backend.publish(1)
        connector = aiohttp.UnixConnector(str(endpoint.socket))
        async with aiohttp.ClientSession(endpoint.url, connector=connector) as http:
            messages = [{"role": "user", "content": "What is 3 plus 4?"}]
            body = {"messages": messages, "temperature": 0, "return_weight_versions": True}
            async with http.post("/v1/chat/completions", json=body) as answer:
                reply = await answer.json()
                assert answer.status == 200, reply
    finally:
        await backend.close()

    choice = reply["choices"][0]
    assert (endpoint.model_name, endpoint.max_model_len) == ("demo", 512)
    assert metrics["skipped"] == 0 and metrics["tokens"] > 0
    assert choice["message"]["content"].endswith("7.") and choice["finish_reason"] == "stop"
    assert [span["version"] for span in choice["weight_versions"]] == [1]


async def test_an_impossible_job_is_refused_and_a_possible_one_logs_what_it_trains(
    demo_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fakevllm.server")
    backend = ChildEngine(EngineSpec("embedded", tmp_path, str(demo_folder), "demo"))
    try:
        await backend.launch()
        with pytest.raises(BackendRefused, match=r"^target_modules names 'q_prj', no linear"):
            await backend.boot(TrainJob(lora_rank=4, target_modules="q_prj"))
        assert not caplog.records
        await backend.boot(TrainJob(lora_rank=4, target_modules="q_proj"))
        await backend.save(tmp_path / "saved")
    finally:
        await backend.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the embedded engine: trains LoRA of rank 4 on 3 layers, 3,072 of 659,520 parameters, in "
        "float32 on cpu"
    ]

    try:
        await backend.launch()
        await backend.boot(TrainJob())
        with pytest.raises(BackendRefused, match=r"^checkpoint .* lora_rank = 4, .*and the job"):
            await backend.restore(tmp_path / "saved")
    finally:
        await backend.close()
    assert caplog.messages[-1].endswith(": trains all 656,448 parameters, in float32 on cpu")


@pytest.mark.parametrize("flag", ["--torch-threads=auto", "--prefix-cache-mib=0"])
def test_flags_of_the_sampler_are_refused_for_a_trainer_alone(tmp_path: Path, flag: str) -> None:
    command = [*arguments(tmp_path, tmp_path), flag, "--train-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=ENVIRONMENT)

    assert done.returncode == 2
    assert done.stderr.endswith("are for sampling: not with --train-only\n")
