"""`fakevllm-server plan`: what each GPU holds, with the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fakevllm_server.cli.exit_codes import run_server_command
from fakevllm_server.cli.server_file import read_server_file, split_arguments

if TYPE_CHECKING:
    from fakevllm_adapters.job.model import TrainJob
    from fakevllm_server.placement.memory_plan import GpuRole, MemoryPlan

DOES_NOT_FIT = 2
"""Exit code if the model does not fit into the memory of the GPUs."""
PHASES = {
    "always": "",
    "sampling": "while vLLM samples",
    "passes": "in forward and backward passes",
    "update": "in the optimizer's update",
    "export": "while weights are exported",
}
"""Texts for the phases in which a part of the memory is held."""


def plan(
    config: Annotated[
        Path,
        typer.Option(help="File of `start --config`, with a section cluster. It may have a [job]."),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, or `demo`. Only its config.json is read."),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="YAML file with the job. Default: [job] of the TOML file.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Calculate what each GPU holds, and say whether it fits. Nothing is started, and no GPU is
    needed. The exit code is 2 if something does not fit."""

    def run() -> None:
        import json

        result = calculate(config, model, job)
        print(json.dumps(plan_json(result)) if json_output else "\n".join(plan_lines(result)))
        if not result.fits:
            raise typer.Exit(DOES_NOT_FIT)

    run_server_command(run)


def calculate(file: Path, model: str | None, job_file: Path | None) -> MemoryPlan:
    """Return the plan for a configuration file. `model` overrides the file's model. `job_file`
    overrides the file's job. Raises ConfigError if the file, the model or the job has a mistake."""
    from fakevllm_adapters.job.model import TrainJob
    from fakevllm_runtime.errors import ConfigError
    from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
    from fakevllm_server.cli.main import start
    from fakevllm_server.config.memory_check import memory_plan
    from fakevllm_server.config.model import ServerConfig
    from fakevllm_server.placement.model_shape import read_model_shape

    settings = read_server_file(file, start)
    flags = settings.flags
    job = _read_job(job_file) if job_file is not None else settings.job or TrainJob()
    config = ServerConfig(
        flags.get("backend", "embedded"),
        flags.get("run_dir", Path("runs/default")),
        rollout=flags.get("rollout"),
        trainer=flags.get("trainer"),
        rollout_url=next(iter(flags.get("rollout_url", ())), None),
        more_rollout_urls=flags.get("rollout_url", [])[1:],
        replicas=flags.get("replicas", 1),
        engine_args=split_arguments(flags.get("engine_arg")),
        trainer_args=split_arguments(flags.get("trainer_arg")),
        cluster=settings.cluster,
    )
    model = model or flags.get("model") or job.model
    if model is None:
        raise ConfigError(f"{file} names no model: set --model to a folder with a config.json.")
    folder = DEMO_MODEL_DIR if model == "demo" else Path(model)
    return memory_plan(config, job, read_model_shape(folder))


def _read_job(file: Path) -> TrainJob:
    from fakevllm_adapters.job.model import TrainJob
    from fakevllm_runtime.errors import ConfigError

    try:
        return TrainJob.from_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The file {file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def plan_lines(plan: MemoryPlan) -> Iterator[str]:
    """Yield the lines of a plan for people."""
    from fakevllm_server.placement.memory_parts import gib

    deployment = plan.deployment
    cluster, shape = deployment.cluster, deployment.shape
    yield (
        f"{shape.num_parameters:,} parameters; {cluster.nodes} x {cluster.gpus_per_node} GPUs of "
        f"{gib(deployment.rollout.gpu_bytes)}: {cluster.division}"
    )
    for role in plan.roles:
        yield ""
        yield from _role_lines(role)
    yield ""
    yield from plan.problems
    yield from plan.notes
    yield "It fits." if plan.fits else "It does not fit."


def _role_lines(role: GpuRole) -> Iterator[str]:
    from fakevllm_server.placement.memory_parts import gib

    first, last = role.gpus[0], role.gpus[-1]
    is_one = first == last
    yield f"GPU {first} {role.name}:" if is_one else f"GPUs {first} to {last}, each {role.name}:"
    phase = None
    width = max(len(part.name) for part in role.parts)
    for part in sorted(role.parts, key=lambda part: [*PHASES].index(part.phase)):
        if part.phase != phase and PHASES[part.phase]:
            yield f"  {PHASES[part.phase]}:"
        phase = part.phase
        yield f"  {part.name:<{width}}  {gib(part.num_bytes):>12}  {part.formula}"
    yield f"  {'at most':<{width}}  {gib(role.peak_bytes):>12}  {_sum_text(role)}"


def _sum_text(role: GpuRole) -> str:
    """Return which parts are held at the same time."""
    phase = PHASES[role.peak_phase]
    has_phases = any(part.phase != "always" for part in role.parts)
    return phase if has_phases else "all the time"


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan for programs. Sizes are in bytes."""
    deployment = plan.deployment
    return {
        "fits": plan.fits,
        "parameters": deployment.shape.num_parameters,
        "gpu_bytes": deployment.rollout.gpu_bytes,
        "gpus": [
            {
                "gpus": [*role.gpus],
                "role": role.name,
                "bytes": role.peak_bytes,
                "parts": [
                    {
                        "name": part.name,
                        "bytes": part.num_bytes,
                        "phase": part.phase,
                        "formula": part.formula,
                    }
                    for part in role.parts
                ],
            }
            for role in plan.roles
        ],
        "problems": [*plan.problems],
        "notes": [*plan.notes],
    }
