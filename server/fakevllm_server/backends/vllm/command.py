"""How vLLM is started: its arguments and environment. Decides only; nothing is run here.

What is set here are defaults: an argument or a variable of the user's own wins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec

KEEPER = (sys.executable, "-m", "fakevllm_server.backends.vllm.keeper", "--")
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
"""Rather than the `vllm` script, which is found only where the environment is activated."""

KNOWN_VERSIONS = ((0, 24), (0, 32))
"""From the first, below the second."""

REFUSED = {
    "uds": "the server chooses the engine's socket: leave --uds away",
    "api-key": "only the server reaches the engine: guard the server itself with --key-file",
    "trust-remote-code": "code from a model folder is never run: leave --trust-remote-code away",
}
"""Arguments of vLLM's that break what the server relies on, and what to do."""

JOB_ARGUMENTS = {
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "tensor-parallel-size": "tensor_model_parallel_size",
}
"""vLLM's name -> the job's."""

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
"""Two literals of a chat template -> vLLM's name for the parser of its tool calls. The first match
counts. Only parsers that every known version has."""


@dataclass(frozen=True, slots=True)
class Install:
    """The vLLM beside this Python."""

    version: str

    @property
    def is_cpu(self) -> bool:
        """vLLM chooses its own platform by the same word."""
        return "cpu" in self.version

    @property
    def is_known(self) -> bool:
        low, high = KNOWN_VERSIONS
        return low <= _release(self.version) < high


def command(
    spec: EngineSpec, install: Install, socket: Path, chat_template: str | None
) -> list[str]:
    """Raises BackendRefused where the user's arguments contradict the server's."""
    if spec.model is None:
        raise BackendRefused("vLLM needs a model: give --model a folder in Hugging Face form")
    given = given_flags(spec.extra_args)
    for flag, reason in REFUSED.items():
        if flag in given:
            raise BackendRefused(reason)
    arguments = [
        part
        for name, value in _defaults(spec, install, chat_template)
        if name not in given
        for part in ([f"--{name}"] if value is None else [f"--{name}", value])
    ]
    return [*KEEPER, *VLLM, spec.model, "--uds", str(socket), *arguments, *spec.extra_args]


def job_arguments(job: TrainJob) -> dict[str, str]:
    """What the job says of the engine.

    >>> job_arguments(TrainJob(max_num_seqs=8))
    {'max-num-seqs': '8'}
    """
    asked = {name: getattr(job, setting) for name, setting in JOB_ARGUMENTS.items()}
    return {name: str(value) for name, value in asked.items() if value is not None}


def environment(given: Mapping[str, str], install: Install) -> dict[str, str]:
    """Of vLLM's process, from the server's."""
    ours = {
        # The routes that change weights. Nothing but the server reaches the socket.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if install.is_cpu:
        # "auto" binds the worker's threads to the first cores, whoever else runs there.
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    result = ours | dict(given)
    # It is for a vLLM with a port of its own; here it would shut out the server.
    result.pop("VLLM_API_KEY", None)
    return result


def tool_parser(chat_template: str | None) -> str | None:
    """vLLM's parser for the tool calls this template writes, or None where none is known.

    >>> tool_parser("{{ '<tool_call>' }}")
    'hermes'
    """
    template = chat_template or ""
    matching = (name for one, other, name in TOOL_MARKERS if one in template and other in template)
    return next(matching, None)


def given_flags(arguments: Sequence[str]) -> dict[str, str | None]:
    """Long flags by the name vLLM knows them by, with their value where they have one.

    >>> given_flags(["--max_model_len=512", "--no-enforce-eager", "--dtype", "half"])
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


def _defaults(
    spec: EngineSpec, install: Install, chat_template: str | None
) -> Iterator[tuple[str, str | None]]:
    yield "served-model-name", spec.served_model_name
    yield "seed", str(spec.seed)
    # Training needs the logprobs of the distribution that was sampled from, temperature included.
    yield "logprobs-mode", "processed_logprobs"
    yield "enable-prefix-caching", None
    yield "disable-uvicorn-access-log", None
    parser = tool_parser(chat_template)
    if parser is not None or "tool-call-parser" in given_flags(spec.extra_args):
        yield "enable-auto-tool-choice", None
    if parser is not None:
        yield "tool-call-parser", parser
    for name, value in spec.job_args.items():
        if name != "gpu-memory-utilization" or not install.is_cpu:
            yield name, value
    if install.is_cpu:
        yield "enforce-eager", None
        yield "dtype", "float32"


def _release(version: str) -> tuple[int, int]:
    """
    >>> _release("0.27.1+cpu")
    (0, 27)
    """
    major, _, rest = version.partition(".")
    digits = "".join(char if char.isdigit() else " " for char in rest).split()
    return (int(major) if major.isdigit() else 0, int(digits[0]) if digits else 0)
