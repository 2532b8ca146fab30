"""Build the command line and the environment of `vllm serve`. This module does not start a process.

Most values are defaults. An argument or an environment variable of the user overrides a default.
Arguments that break an assumption of the server are refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.http.policies import MAX_POLICIES
from fakevllm_server.backends.vllm.weight_update import transfer_engine
from fakevllm_server.backends.weight_transfer import PLUGIN_PATH
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.weight_transfer import IPC, JSON

SUPERVISOR = (sys.executable, "-m", "fakevllm_server.backends.vllm.process_supervisor", "--")
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
"""The module behind the `vllm` script. The script is on PATH only in an activated environment."""

KNOWN_VERSIONS = ((0, 24), (0, 32))
"""The tested range of (major, minor): the first version is included, the second is not."""

REFUSED = {
    "model": "vLLM would serve another model than the one that is trained: use --model instead",
    "uds": "the server chooses the engine's socket: remove --uds",
    "api-key": "only the server reaches the engine: protect the server with --key-file",
    "trust-remote-code": "code from a model folder is never run: remove --trust-remote-code",
    "allowed-media-domains": "the server checks media URLs too: use --media-domain HOST instead",
    "allowed-local-media-path": (
        "no request may read the server's files: remove --allowed-local-media-path"
    ),
}
"""vLLM arguments that break an assumption of the server, each with the reason and the fix."""

NO_MEDIA_DOMAIN = "none.invalid"
"""Host name that cannot exist (RFC 2606). If vLLM's list of allowed hosts is empty, vLLM fetches
media from every host. Therefore a server without `--media-domain` passes this name as the list."""

JOB_ARGUMENTS = {
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "tensor-parallel-size": "tensor_model_parallel_size",
}
"""Arguments of vLLM, each with the job setting that has the same meaning."""

GPU_FLAGS = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
}
"""Arguments of vLLM that are factors of its number of GPUs, by their short flags."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
MERGED_INSTEAD = (
    "leave --engine-arg=--enable-lora out: vLLM then gets the adapters merged into the weights"
)
MAX_ADAPTERS = MAX_POLICIES + 2
"""Number of adapters that calls may use at the same time: the policies, the served weights, and the
previously served weights, which running calls may still use."""
NUM_CACHED_ADAPTERS = 2 * MAX_ADAPTERS
"""Number of adapters in vLLM's memory. An unloaded adapter stays in memory. When the memory for
adapters is full, vLLM removes the least recently used adapter."""

TOOL_MARKERS = (
    ("<tool_call>", "<arg_key>", "glm45"),
    ("<tool_call>", "<function=", "qwen3_coder"),
    ("<tool_call>", "", "hermes"),
    ("[TOOL_CALLS]", "", "mistral"),
    ("<|tool_calls_section_begin|>", "", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "", "deepseek_v31"),
    ("<minimax:tool_call>", "", "minimax_m2"),
    ("<seed:tool_call>", "", "seed_oss"),
    ("<longcat_tool_call>", "", "longcat"),
    ("<function_calls>", "", "olmo3"),
    ("<|action_start|>", "", "internlm"),
    ("<|channel|>commentary", "", "openai"),
    ("<|python_tag|>", "", "llama3_json"),
    ("<|tool|>", "<|tool_call|>", "phi4_mini_json"),
    ("<|tool_call|>", "", "granite"),
)
"""Each entry has two texts and vLLM's name of a tool-call parser. The parser fits a chat template
that contains both texts. The first entry that fits is used. Every version in `KNOWN_VERSIONS` has
these parsers."""


@dataclass(frozen=True, slots=True)
class Install:
    """The vLLM package that is installed for this Python."""

    version: str

    @property
    def is_cpu(self) -> bool:
        """Whether the installed vLLM is a build for CPUs. The version of such a build contains
        "cpu". vLLM itself looks for the same text to select its platform."""
        return "cpu" in self.version

    @property
    def is_known(self) -> bool:
        """Whether the installed version of vLLM is in `KNOWN_VERSIONS`."""
        low, high = KNOWN_VERSIONS
        return low <= _release(self.version) < high


def serve_command(
    spec: EngineSpec, install: Install, socket: Path, chat_template: str | None
) -> list[str]:
    """Return the command that starts `vllm serve` on a Unix socket, as a child of the process
    supervisor.

    Raise BackendRefused in these cases:

    * `spec` has no model.
    * `spec` has an argument that is listed in `REFUSED`.
    * `spec` has arguments for adapters that do not fit the job.
    """
    if spec.model is None:
        raise BackendRefused("vLLM needs a model: set --model to a folder in Hugging Face format")
    user_flags = parse_flags(spec.extra_args)
    for flag, reason in REFUSED.items():
        if flag in user_flags:
            raise BackendRefused(reason)
    if max_lora_rank(spec) is not None:
        _check_api_servers(spec.extra_args)
    arguments = [
        part
        for name, value in _defaults(spec, install, chat_template)
        if name not in user_flags
        for part in ([f"--{name}"] if value is None else [f"--{name}", value])
    ]
    media = ["--allowed-media-domains", *(spec.media_domains or [NO_MEDIA_DOMAIN])]
    server_arguments = [spec.model, "--uds", str(socket), *media, *arguments]
    return [*SUPERVISOR, *VLLM, *server_arguments, *spec.extra_args]


def max_lora_rank(spec: EngineSpec) -> int | None:
    """Return vLLM's `--max-lora-rank` if vLLM holds LoRA adapters. Return None if vLLM gets whole
    weights instead. In this case, vLLM holds only one set of weights.

    vLLM holds adapters only if the server starts vLLM and the user has passed `--enable-lora`.
    Raise BackendRefused if the user has passed `--enable-lora`, but the job trains no adapters or
    the rank of the job's adapters is too high for vLLM.
    """
    if spec.url is not None or not has_lora_flag(spec.extra_args):
        return None
    if spec.lora_rank == 0:
        raise BackendRefused(
            "vLLM with --enable-lora takes adapters in place of whole weights, and nothing here "
            "trains adapters: set lora_rank in the job, or leave --engine-arg=--enable-lora out"
        )
    for rank in LORA_RANKS:
        if rank >= spec.lora_rank:
            return rank
    raise BackendRefused(
        f"vLLM holds adapters up to rank {LORA_RANKS[-1]}, and lora_rank is {spec.lora_rank}: "
        f"lower lora_rank, or {MERGED_INSTEAD}"
    )


def transfer_engine_of(spec: EngineSpec, install: Install) -> str | None:
    """Return the name of vLLM's weight transfer engine. Return None if vLLM loads new weights from
    a folder. Raise BackendRefused if vLLM has several GPUs, of which some train."""
    if spec.weight_transport != "vllm":
        return None
    engine = transfer_engine(is_cpu=install.is_cpu, shares_gpu=spec.shares_gpu)
    if engine == IPC and _has_several_gpus(spec):
        raise BackendRefused(
            "--weight-transport vllm cannot send to a vLLM of several GPUs of which some train: "
            "give vLLM GPUs of its own with a section cluster, or remove --weight-transport"
        )
    return engine


def job_arguments(job: TrainJob) -> dict[str, str]:
    """Return the arguments of `vllm serve` for a job's engine settings. The keys are the names of
    the arguments without leading dashes.

    >>> job_arguments(TrainJob(max_num_seqs=8))
    {'max-num-seqs': '8'}
    """
    values = {name: getattr(job, setting) for name, setting in JOB_ARGUMENTS.items()}
    return {name: str(value) for name, value in values.items() if value is not None}


def serve_environment(
    inherited: Mapping[str, str],
    install: Install,
    *,
    holds_adapters: bool = False,
    transfer_engine: str | None = None,
) -> dict[str, str]:
    """Return the environment variables for vLLM's process. Variables in `inherited` override the
    defaults of this function. There are two exceptions. VLLM_API_KEY is always removed, because the
    server's requests carry no key. Redirects of media URLs are always disabled."""
    defaults = {
        # Enables the routes that change weights. Only the server can reach the socket.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if install.is_cpu:
        # "auto" binds the worker's threads to the first cores, even if these are busy.
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = defaults | dict(inherited)
    # With this variable, vLLM would refuse the server's requests, which carry no key.
    result.pop("VLLM_API_KEY", None)
    # An allowed host must not redirect vLLM to a host that is not allowed.
    result["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    if holds_adapters:
        result["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if transfer_engine == IPC:
        # vLLM gets handles of GPU memory as a pickle. Only the server reaches vLLM's socket.
        result["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if transfer_engine == JSON:
        path = [str(PLUGIN_PATH), result.get("PYTHONPATH", "")]
        result["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return result


def tool_parser(chat_template: str | None) -> str | None:
    """Return the name of vLLM's parser for the tool call format of a chat template. Return None if
    no parser is known.

    >>> tool_parser("{{ '<tool_call>' }}")
    'hermes'
    """
    template = chat_template or ""
    matching = (name for a, b, name in TOOL_MARKERS if a in template and b in template)
    return next(matching, None)


def parse_flags(arguments: Sequence[str]) -> dict[str, str | None]:
    """Parse command line arguments. Return the value of each long flag by its name, or None for a
    flag without a value.

    Names are in vLLM's form: without leading dashes, without the prefix `no-`, and with hyphens
    instead of underscores.

    >>> parse_flags(["--max_model_len=512", "--no-enforce-eager", "--dtype", "half"])
    {'max-model-len': '512', 'enforce-eager': None, 'dtype': 'half'}
    """
    return dict(_flags(arguments))


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        flag, has_value, value = argument.partition("=")
        name = flag[2:].replace("_", "-").removeprefix("no-")
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        yield name, value if has_value else None if following.startswith("--") else following


def has_lora_flag(arguments: Sequence[str]) -> bool:
    """Return True if vLLM gets `--enable-lora`. If the arguments contain the flag or its negation
    several times, the last occurrence decides, as in vLLM."""
    flags = [argument.replace("_", "-") for argument in arguments]
    chosen = [flag for flag in flags if flag in ("--enable-lora", "--no-enable-lora")]
    return chosen[-1:] == ["--enable-lora"]


def _has_several_gpus(spec: EngineSpec) -> bool:
    """Return True if the arguments of the user or of the job divide vLLM among several GPUs."""
    of_user = parse_flags([_with_long_gpu_flag(argument) for argument in spec.extra_args])
    sizes = {**spec.job_args, **of_user}
    return any(sizes.get(name, "1") != "1" for name in GPU_FLAGS.values())


def _with_long_gpu_flag(argument: str) -> str:
    """Return an argument with the long flag in place of a short flag in `GPU_FLAGS`.

    >>> _with_long_gpu_flag("-tp=2")
    '--tensor-parallel-size=2'
    """
    flag, has_value, value = argument.partition("=")
    return f"--{GPU_FLAGS[flag]}{has_value}{value}" if flag in GPU_FLAGS else argument


def _check_api_servers(arguments: Sequence[str]) -> None:
    """Raise BackendRefused if the user's arguments start several API servers. A vLLM with adapters
    needs a single API server."""
    has_short_flag = any(argument.startswith("-asc") for argument in arguments)
    if has_short_flag or parse_flags(arguments).get("api-server-count", "1") != "1":
        raise BackendRefused(
            "only one of vLLM's API servers would know an adapter: leave --api-server-count out, "
            "or leave --engine-arg=--enable-lora out"
        )


def _defaults(
    spec: EngineSpec, install: Install, chat_template: str | None
) -> Iterator[tuple[str, str | None]]:
    yield "served-model-name", spec.served_model_name
    yield "seed", str(spec.seed)
    # Training needs the logprobs of the distribution that was sampled from, with the temperature.
    yield "logprobs-mode", "processed_logprobs"
    yield "enable-prefix-caching", None
    yield "disable-uvicorn-access-log", None
    engine = transfer_engine_of(spec, install)
    if engine is not None:
        yield "weight-transfer-config", json.dumps({"backend": engine})
    if spec.sleeps and not install.is_cpu:  # vLLM has this argument for GPUs only
        yield "enable-sleep-mode", None
    parser = tool_parser(chat_template)
    if parser is not None or "tool-call-parser" in parse_flags(spec.extra_args):
        yield "enable-auto-tool-choice", None
    if parser is not None:
        yield "tool-call-parser", parser
    rank = max_lora_rank(spec)
    if rank is not None:
        yield "max-lora-rank", str(rank)
        yield "max-loras", str(MAX_ADAPTERS)
        yield "max-cpu-loras", str(NUM_CACHED_ADAPTERS)
    if rank is not None or "data-parallel-size" in spec.job_args:
        # Only one of several API servers would load an adapter, or be paused for new weights.
        yield "api-server-count", "1"
    for name, value in spec.job_args.items():
        if name != "gpu-memory-utilization" or not install.is_cpu:
            yield name, value
    if install.is_cpu:
        yield "enforce-eager", None
        yield "dtype", "float32"


def _release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version. A number that cannot be read counts as 0.

    >>> _release("0.27.1+cpu")
    (0, 27)
    """
    major, _, rest = version.partition(".")
    digits = "".join(char if char.isdigit() else " " for char in rest).split()
    return (int(major) if major.isdigit() else 0, int(digits[0]) if digits else 0)
