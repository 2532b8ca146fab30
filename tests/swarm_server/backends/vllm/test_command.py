"""The command line and environment of `vllm serve`."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.http.policies import MAX_POLICIES
from fakevllm_server.backends.vllm import command as module
from fakevllm_server.backends.vllm.command import (
    MAX_ADAPTERS,
    NUM_CACHED_ADAPTERS,
    Install,
    job_arguments,
    max_lora_rank,
    parse_flags,
    serve_command,
    serve_environment,
    tool_parser,
)
from fakevllm_server.backends.weight_transfer.plugin import register
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.weight_transfer import IPC, JSON, NCCL

GPU, CPU = Install("0.31.0"), Install("0.27.1+cpu")
HERMES = "{{ '<tool_call>' }}"


def vllm_arguments(
    *arguments: str,
    install: Install = GPU,
    template: str | None = None,
    model: str | None = "m",
    job: TrainJob | None = None,
    media_domains: tuple[str, ...] = (),
    lora_rank: int = 0,
) -> list[str]:
    """Return the arguments after `vllm serve`."""
    spec = EngineSpec(
        "vllm",
        Path("."),
        model,
        "served",
        seed=7,
        extra_args=arguments,
        job_args=job_arguments(job or TrainJob()),
        media_domains=media_domains,
        lora_rank=lora_rank,
    )
    whole_command = serve_command(spec, install, Path("s"), template)
    assert whole_command[: len(module.SUPERVISOR)] == list(module.SUPERVISOR)
    return whole_command[len(module.SUPERVISOR) + len(module.VLLM) :]


def test_the_default_arguments_are_these() -> None:
    assert vllm_arguments() == [
        *("m", "--uds", "s", "--allowed-media-domains", module.NO_MEDIA_DOMAIN),
        *("--served-model-name", "served", "--seed", "7"),
        *("--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
        "--disable-uvicorn-access-log",
    ]


def test_vllm_gets_the_allowed_media_domains_and_follows_no_redirects() -> None:
    arguments = vllm_arguments(media_domains=("a.org", "b.org"))
    position = arguments.index("--allowed-media-domains")
    assert arguments[position + 1 : position + 3] == ["a.org", "b.org"]
    inherited = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"}
    assert serve_environment(inherited, GPU)["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


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
def test_an_argument_of_the_user_replaces_the_default(
    arguments: tuple[str, ...], replaced: str
) -> None:
    command = vllm_arguments(*arguments)
    assert replaced not in command
    assert command[-len(arguments) :] == list(arguments)


def test_on_a_cpu_vllm_runs_eagerly_in_float32_unless_the_user_overrides_it() -> None:
    assert vllm_arguments(install=CPU)[-3:] == ["--enforce-eager", "--dtype", "float32"]
    overridden = vllm_arguments("--dtype", "bfloat16", "--no-enforce-eager", install=CPU)
    assert "--enforce-eager" not in overridden and "float32" not in overridden


JOB = TrainJob(
    max_model_len=18000, max_num_seqs=64, gpu_memory_utilization=0.85, tensor_model_parallel_size=2
)


def test_a_vllm_with_several_copies_of_the_model_has_one_api_server() -> None:
    spec = EngineSpec("vllm", Path("."), "m", "s", job_args={"data-parallel-size": "2"})
    command = serve_command(spec, GPU, Path("s"), None)
    assert command[-4:] == ["--api-server-count", "1", "--data-parallel-size", "2"]
    chosen = replace(spec, extra_args=["--api-server-count=2"])
    assert serve_command(chosen, GPU, Path("s"), None).count("--api-server-count") == 0


def test_engine_settings_of_the_job_become_arguments() -> None:
    assert vllm_arguments(job=JOB)[-8:] == [
        *("--max-model-len", "18000", "--max-num-seqs", "64"),
        *("--gpu-memory-utilization", "0.85", "--tensor-parallel-size", "2"),
    ]
    assert vllm_arguments(job=TrainJob()) == vllm_arguments()


def test_an_argument_of_the_user_replaces_the_jobs() -> None:
    command = vllm_arguments("--max_model_len=512", "--gpu-memory-utilization", "0.45", job=JOB)
    assert "18000" not in command and "0.85" not in command
    assert command[-3:] == ["--max_model_len=512", "--gpu-memory-utilization", "0.45"]


def test_gpu_memory_utilization_is_not_passed_on_a_cpu() -> None:
    assert "--gpu-memory-utilization" not in vllm_arguments(job=JOB, install=CPU)
    assert "--max-model-len" in vllm_arguments(job=JOB, install=CPU)


def test_the_tool_parser_is_the_one_that_fits_the_chat_template() -> None:
    assert vllm_arguments(template=HERMES)[-3:] == [
        "--enable-auto-tool-choice",
        *("--tool-call-parser", "hermes"),
    ]
    assert "--tool-call-parser" not in vllm_arguments(template="no tools")


def test_a_tool_parser_of_the_user_replaces_the_default_and_is_enabled() -> None:
    command = vllm_arguments("--tool-call-parser", "xlam", template=HERMES)
    assert "hermes" not in command and "--enable-auto-tool-choice" in command
    assert "--enable-auto-tool-choice" in vllm_arguments("--tool-call-parser", "xlam")
    off = vllm_arguments("--no-enable-auto-tool-choice", template=HERMES)
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
def test_an_argument_that_would_break_or_expose_the_server_is_refused(flag: str) -> None:
    with pytest.raises(BackendRefused, match=r"remove --|--key-file"):
        vllm_arguments(flag)


def test_code_of_a_model_is_not_trusted_by_default() -> None:
    assert not any("trust" in part for part in vllm_arguments(install=CPU, template=HERMES))


def test_without_a_model_the_error_names_the_flag() -> None:
    with pytest.raises(BackendRefused, match="--model"):
        vllm_arguments(model=None)


def test_the_environment_enables_weight_updates_and_disables_usage_reports() -> None:
    environment = serve_environment({"PATH": "/bin"}, GPU)
    assert environment == {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }


def test_on_a_cpu_the_cache_is_bounded_and_threads_are_not_pinned() -> None:
    environment = serve_environment({"VLLM_CPU_KVCACHE_SPACE": "8"}, CPU)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("install", "shares_gpu", "engine"),
    [(CPU, True, JSON), (CPU, False, JSON), (GPU, True, IPC), (GPU, False, NCCL)],
)
def test_the_places_of_vllm_and_the_trainer_choose_the_weight_transfer_engine(
    install: Install, shares_gpu: bool, engine: str
) -> None:
    spec = EngineSpec("vllm", Path("."), "m", "s", weight_transport="vllm", shares_gpu=shares_gpu)
    argument = f'{{"backend": "{engine}"}}'
    whole_command = serve_command(spec, install, Path("s"), None)
    assert whole_command[whole_command.index("--weight-transfer-config") + 1] == argument
    by_folder = serve_command(replace(spec, weight_transport="folder"), install, Path("s"), None)
    assert "--weight-transfer-config" not in by_folder


@pytest.mark.parametrize(
    "division",
    [
        {"extra_args": ["--tensor-parallel-size=2"]},
        {"extra_args": ["-tp", "2"]},
        {"extra_args": ["-pp=2"]},
        {"job_args": {"tensor-parallel-size": "2"}},
    ],
    ids=str,
)
def test_weights_are_not_sent_to_several_gpus_of_which_some_train(division: Any) -> None:
    spec = EngineSpec("vllm", Path("."), "m", "s", weight_transport="vllm", **division)
    with pytest.raises(BackendRefused, match="a vLLM of several GPUs of which some train: give v"):
        serve_command(spec, GPU, Path("s"), None)
    serve_command(spec, CPU, Path("s"), None)
    serve_command(replace(spec, shares_gpu=False), GPU, Path("s"), None)
    serve_command(replace(spec, weight_transport="folder"), GPU, Path("s"), None)


@pytest.mark.parametrize(
    "arguments",
    [["-tp", "1"], ["-tp=1"], ["-dp=1", "-pp", "1"], ["-dpa", "10.0.0.1"], ["-tp", "2", "-tp=1"]],
    ids=str,
)
def test_weights_are_sent_to_a_vllm_with_short_flags_for_one_gpu(arguments: list[str]) -> None:
    division: Any = {"extra_args": arguments, "job_args": {"tensor-parallel-size": "1"}}
    spec = EngineSpec("vllm", Path("."), "m", "s", weight_transport="vllm", **division)
    assert "--weight-transfer-config" in serve_command(spec, GPU, Path("s"), None)


def test_only_a_vllm_that_maps_memory_of_the_gpu_may_unpickle() -> None:
    insecure = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    assert serve_environment({}, GPU, transfer_engine=IPC)[insecure] == "1"
    for engine in (NCCL, JSON, None):
        assert insecure not in serve_environment({}, GPU, transfer_engine=engine)


def test_vllm_finds_the_plugin_beside_the_import_path_of_the_user() -> None:
    assert "PYTHONPATH" not in serve_environment({}, CPU, transfer_engine=None)
    environment = serve_environment({"PYTHONPATH": "/own"}, CPU, transfer_engine=JSON)
    folder, own = environment["PYTHONPATH"].split(os.pathsep)
    assert own == "/own"
    (plugin,) = [
        entry_point
        for distribution in distributions(path=[folder])
        for entry_point in distribution.entry_points
    ]
    assert plugin.group == "vllm.general_plugins"
    assert plugin.load() is register


def test_a_vllm_that_sleeps_gets_the_flag_on_gpus_only() -> None:
    spec = EngineSpec("vllm", Path("."), "m", "s", sleeps=True)
    assert "--enable-sleep-mode" in serve_command(spec, GPU, Path("s"), None)
    assert "--enable-sleep-mode" not in serve_command(spec, CPU, Path("s"), None)
    awake = serve_command(replace(spec, sleeps=False), GPU, Path("s"), None)
    assert "--enable-sleep-mode" not in awake


def test_an_api_key_in_the_environment_is_not_passed_on() -> None:
    assert "VLLM_API_KEY" not in serve_environment({"VLLM_API_KEY": "k"}, GPU)


def test_the_next_flag_is_not_the_value_of_a_flag() -> None:
    assert parse_flags(["--enforce-eager", "--dtype", "half", "-tp", "2"]) == {
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


@pytest.mark.parametrize("flag", ["--enable-lora", "--enable_lora"])
def test_a_vllm_with_the_users_flag_holds_the_adapters_of_the_job(flag: str) -> None:
    command = vllm_arguments(flag, lora_rank=9)
    assert command[-9:] == [
        *("--max-lora-rank", "16"),
        *("--max-loras", str(MAX_ADAPTERS), "--max-cpu-loras", str(NUM_CACHED_ADAPTERS)),
        *("--api-server-count", "1"),
        flag,
    ]
    assert command.count("--enable-lora") + command.count("--enable_lora") == 1
    assert MAX_POLICIES + 1 < MAX_ADAPTERS < NUM_CACHED_ADAPTERS
    environment = serve_environment({}, GPU, holds_adapters=True)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in serve_environment({}, GPU)


@pytest.mark.parametrize("arguments", [(), ("--enable-lora", "--no-enable-lora")])
def test_without_the_users_flag_the_adapters_are_merged_whatever_their_rank(
    arguments: tuple[str, ...],
) -> None:
    for lora_rank in (8, 600):
        assert vllm_arguments(*arguments, lora_rank=lora_rank) == [*vllm_arguments(), *arguments]
        spec = EngineSpec("vllm", Path("."), "m", "s", extra_args=arguments, lora_rank=lora_rank)
        assert max_lora_rank(spec) is None


def test_a_vllm_of_the_user_gets_merged_weights() -> None:
    arguments = ["--enable-lora"]
    spec = EngineSpec("vllm", Path("."), "m", "served", extra_args=arguments, lora_rank=8)
    assert max_lora_rank(spec) == 8
    assert max_lora_rank(replace(spec, url="http://127.0.0.1:8001")) is None


@pytest.mark.parametrize(
    ("lora_rank", "remedy"),
    [(0, "set lora_rank in the job, or leave"), (513, "lower lora_rank, or leave")],
)
def test_adapters_that_vllm_could_not_hold_are_refused_with_the_remedy(
    lora_rank: int, remedy: str
) -> None:
    for flag in ("--enable-lora", "--enable_lora"):
        with pytest.raises(BackendRefused, match=f"{remedy} --engine-arg=--enable-lora out"):
            vllm_arguments(flag, lora_rank=lora_rank)


@pytest.mark.parametrize(
    "arguments",
    [("--api-server-count=2",), ("--api_server_count", "0"), ("-asc", "4"), ("-asc=4",)],
)
def test_adapters_are_held_by_one_api_server_only(arguments: tuple[str, ...]) -> None:
    with pytest.raises(BackendRefused, match="only one of vLLM's API servers would know"):
        vllm_arguments("--enable-lora", *arguments, lora_rank=8)
    assert vllm_arguments(*arguments, lora_rank=8)[-1] == arguments[-1]
    assert vllm_arguments("--enable-lora", "--api-server-count=1", lora_rank=8)
