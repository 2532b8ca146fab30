"""`fakevllm-server plan`: its output, its exit codes, and its mistakes in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from swarm_server.placement.plans import CONFIG
from typer.testing import CliRunner, Result

from fakevllm_server.backends.vllm.command import MAX_ADAPTERS
from fakevllm_server.cli.main import app

CLUSTER = "cluster: {gpus_per_node: 8, training_gpus: 6, tensor_parallel: 2, gpu_memory_gib: 79}\n"
YAML = f"backend: verl\nengine-arg: [--max-model-len=8192]\n{CLUSTER}"
TOML = """
[server]
backend = "verl"
model = "MODEL"
engine-arg = ["--max-model-len=8192"]
[server.cluster]
gpus_per_node = 8
training_gpus = 6
tensor_parallel = 2
gpu_memory_gib = 79.5
[job]
micro_batch_tokens = 8192
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config.json and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def planned(folder: Path, text: str, *arguments: object, name: str = "server.yaml") -> Result:
    file = folder / name
    file.write_text(text)
    return CliRunner().invoke(app, ["plan", "--config", str(file), *map(str, arguments)])


def test_a_plan_lists_what_each_gpu_holds_with_its_formula(tmp_path: Path, model: Path) -> None:
    result = planned(tmp_path, YAML, "--model", model)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "GPUs 0 to 1, each samples with vLLM:" in lines
    assert "weights 4.73 GiB 4 bytes x 7,615,616,512 parameters / 6 GPUs" in lines
    assert lines[-1] == "It fits."


def test_a_plan_for_programs_has_bytes(tmp_path: Path, model: Path) -> None:
    result = planned(tmp_path, YAML, "--model", model, "--json")
    plan: dict[str, Any] = json.loads(result.output)
    assert plan["fits"] and plan["parameters"] == 7_615_616_512
    sampling, training = plan["gpus"]
    assert (sampling["gpus"], training["gpus"]) == ([0, 1], [2, 3, 4, 5, 6, 7])
    parts = {part["name"]: part for part in training["parts"]}
    assert parts["weights"]["bytes"] == -(-4 * 7_615_616_512 // 6)
    held = [part["bytes"] for part in parts.values() if part["phase"] in ("always", "passes")]
    assert training["bytes"] == sum(held)


def test_a_plan_that_does_not_fit_ends_with_code_2_and_the_remedy(
    tmp_path: Path, model: Path
) -> None:
    text = YAML.replace("training_gpus: 6", "training_gpus: 1")
    result = planned(tmp_path, text, "--model", model)
    assert result.exit_code == 2
    remedies = "set training_gpus = 2 or train adapters (lora_rank = 16)"
    assert f"has 79.00 GiB: {remedies}" in result.output
    assert result.output.endswith("It does not fit.\n")
    assert not json.loads(planned(tmp_path, text, "--model", model, "--json").output)["fits"]


def test_the_job_is_that_of_the_toml_file_or_a_file_of_its_own(tmp_path: Path, model: Path) -> None:
    text = TOML.replace("MODEL", str(model))
    result = planned(tmp_path, text, name="fakevllm.toml")
    assert result.exit_code == 0 and "8,192 tokens x (28 layers" in result.output
    job = tmp_path / "job.yaml"
    job.write_text("job: {micro_batch_tokens: 1000}\n")
    other = planned(tmp_path, text, "--job", job, name="fakevllm.toml")
    assert "1,000 tokens x (28 layers" in other.output


def test_a_trainer_argument_and_adapters_count(tmp_path: Path, model: Path) -> None:
    own = planned(tmp_path, YAML + "trainer-arg: [--micro-batch-tokens=77]\n", "--model", model)
    assert "77 tokens x (28 layers" in own.output
    text = (
        "backend: vllm\nengine-arg: [--gpu-memory-utilization=0.4, --enable-lora]\n"
        "cluster: {gpus_per_node: 2, training_gpus: 1, gpu_memory_gib: 79}\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text("job: {lora_rank: 8, gradient_checkpointing: true}\n")
    result = planned(tmp_path, text, "--model", model, "--job", job)
    assert f"{MAX_ADAPTERS} adapters x 2 bytes x 20,185,088 parameters" in result.output
    assert "4 bytes x 20,185,088 adapter parameters" in result.output


def test_the_demo_model_can_be_planned(tmp_path: Path) -> None:
    text = "cluster: {gpus_per_node: 1, training_gpus: 1, colocate: shared, gpu_memory_gib: 16}\n"
    result = planned(tmp_path, text, "--model", "demo")
    assert result.exit_code == 0 and "GPU 0 samples and trains:" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend: verl\n", "needs a section cluster .* add it"),
        (YAML.replace(", gpu_memory_gib: 79", ""), "gpu_memory_gib: add it"),
        (YAML.replace("8192", "auto"), "--max-model-len=auto cannot be used in the calculation"),
        (YAML.replace("--max-model-len=8192", "--quantization=fp8"), "is not calculated: remove"),
        (
            YAML.replace("--max-model-len=8192", "--enable-lora"),
            "vLLM with --enable-lora takes adapters .* leave --engine-arg=--enable-lora out",
        ),
        (
            YAML.replace("--max-model-len=8192", "--gpu-memory-utilization=9"),
            "--gpu-memory-utilization=9 must be above 0 and at most 1",
        ),
        (YAML.replace("training_gpus: 6", "training_gpus: 7"), "needs 9 GPUs"),
        (YAML.replace("training_gpus: 6", "trainer_gpus: 6"), "write training-gpus"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, model: Path, text: str, message: str
) -> None:
    result = planned(tmp_path, text, "--model", model)
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert re.search(message, result.output), result.output


def test_a_missing_model_or_job_is_one_line(tmp_path: Path, model: Path) -> None:
    assert "names no model: set --model" in planned(tmp_path, YAML).output
    assert "config.json cannot be read" in planned(tmp_path, YAML, "--model", "absent").output
    absent = planned(tmp_path, YAML, "--model", model, "--job", tmp_path / "absent.yaml")
    assert "absent.yaml cannot be read" in absent.output
