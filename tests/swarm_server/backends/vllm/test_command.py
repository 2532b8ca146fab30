"""How vLLM is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.vllm import command as module
from fakevllm_server.backends.vllm.command import (
    Install,
    command,
    environment,
    given_flags,
    job_arguments,
    tool_parser,
)
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec

GPU, CPU = Install("0.31.0"), Install("0.27.1+cpu")
HERMES = "{{ '<tool_call>' }}"


def started(
    *arguments: str,
    install: Install = GPU,
    template: str | None = None,
    model: str | None = "m",
    job: TrainJob | None = None,
) -> list[str]:
    """What vLLM itself is given."""
    spec = EngineSpec(
        "vllm",
        Path("."),
        model,
        "served",
        seed=7,
        extra_args=arguments,
        job_args=job_arguments(job or TrainJob()),
    )
    whole = command(spec, install, Path("s"), template)
    assert whole[: len(module.KEEPER)] == list(module.KEEPER)
    return whole[len(module.KEEPER) + len(module.VLLM) :]


def test_ours_are_the_defaults() -> None:
    assert started() == [
        *("m", "--uds", "s", "--served-model-name", "served", "--seed", "7"),
        *("--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
        "--disable-uvicorn-access-log",
    ]


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (("--logprobs-mode", "raw_logprobs"), "processed_logprobs"),
        (("--logprobs-mode=raw_logprobs",), "processed_logprobs"),
        (("--logprobs_mode=raw_logprobs",), "processed_logprobs"),
        (("--no-enable-prefix-caching",), "--enable-prefix-caching"),
        (("--seed", "9"), "7"),
        (("--served-model-name", "a", "b"), "served"),
    ],
)
def test_an_argument_of_the_users_replaces_ours(arguments: tuple[str, ...], replaced: str) -> None:
    given = started(*arguments)
    assert replaced not in given
    assert given[-len(arguments) :] == list(arguments)


def test_on_a_cpu_nothing_is_compiled_and_numbers_are_exact_unless_the_user_says_so() -> None:
    assert started(install=CPU)[-3:] == ["--enforce-eager", "--dtype", "float32"]
    asked = started("--dtype", "bfloat16", "--no-enforce-eager", install=CPU)
    assert "--enforce-eager" not in asked and "float32" not in asked


JOB = TrainJob(
    max_model_len=18000, max_num_seqs=64, gpu_memory_utilization=0.85, tensor_model_parallel_size=2
)


def test_what_the_job_says_of_the_engine_is_ours_to_pass_on() -> None:
    assert started(job=JOB)[-8:] == [
        *("--max-model-len", "18000", "--max-num-seqs", "64"),
        *("--gpu-memory-utilization", "0.85", "--tensor-parallel-size", "2"),
    ]
    assert started(job=TrainJob()) == started()


def test_an_argument_of_the_users_replaces_the_jobs() -> None:
    given = started("--max_model_len=512", "--gpu-memory-utilization", "0.45", job=JOB)
    assert "18000" not in given and "0.85" not in given
    assert given[-3:] == ["--max_model_len=512", "--gpu-memory-utilization", "0.45"]


def test_a_cpu_has_no_memory_of_a_gpu() -> None:
    assert "--gpu-memory-utilization" not in started(job=JOB, install=CPU)
    assert "--max-model-len" in started(job=JOB, install=CPU)


def test_tool_calls_are_parsed_as_the_chat_template_writes_them() -> None:
    assert started(template=HERMES)[-3:] == [
        "--enable-auto-tool-choice",
        *("--tool-call-parser", "hermes"),
    ]
    assert "--tool-call-parser" not in started(template="no tools")


def test_a_tool_parser_of_the_users_replaces_ours_and_is_switched_on() -> None:
    given = started("--tool-call-parser", "xlam", template=HERMES)
    assert "hermes" not in given and "--enable-auto-tool-choice" in given
    assert "--enable-auto-tool-choice" in started("--tool-call-parser", "xlam")
    off = started("--no-enable-auto-tool-choice", template=HERMES)
    assert "--enable-auto-tool-choice" not in off


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<tool_call>\n{", "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>x<arg_key>", "glm45"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("plain", None),
        (None, None),
    ],
)
def test_the_first_marker_of_a_template_names_the_parser(
    template: str | None, parser: str | None
) -> None:
    assert tool_parser(template) == parser


@pytest.mark.parametrize(
    "flag", ["--uds", "--api-key=k", "--trust-remote-code", "--trust_remote_code"]
)
def test_what_would_break_or_open_the_server_is_refused(flag: str) -> None:
    with pytest.raises(BackendRefused, match=r"leave --|--key-file"):
        started(flag)


def test_code_of_a_model_is_never_trusted_by_default() -> None:
    assert not any("trust" in part for part in started(install=CPU, template=HERMES))


def test_without_a_model_the_user_is_told_what_to_give() -> None:
    with pytest.raises(BackendRefused, match="--model"):
        started(model=None)


def test_weights_can_be_changed_and_nothing_is_reported_outside() -> None:
    ours = environment({"PATH": "/bin"}, GPU)
    assert ours == {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def test_on_a_cpu_memory_is_bounded_and_threads_are_not_bound_unless_the_user_says_so() -> None:
    ours = environment({"VLLM_CPU_KVCACHE_SPACE": "8"}, CPU)
    assert ours["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert ours["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_key_for_some_other_vllm_does_not_shut_out_the_server() -> None:
    assert "VLLM_API_KEY" not in environment({"VLLM_API_KEY": "k"}, GPU)


def test_a_flag_without_a_value_takes_none_from_the_next_flag() -> None:
    assert given_flags(["--enforce-eager", "--dtype", "half", "-tp", "2"]) == {
        "enforce-eager": None,
        "dtype": "half",
    }


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.24.0", True),
        ("0.31.2+cu129", True),
        ("0.27.1+cpu", True),
        ("0.23.9", False),
        ("0.32.0", False),
        ("0.32.0rc1", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_only_versions_in_the_range_are_known(version: str, is_known: bool) -> None:
    assert Install(version).is_known == is_known
