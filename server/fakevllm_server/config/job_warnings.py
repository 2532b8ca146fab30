"""What a job asks for and this server does not do. Pure.

A job says how to train; the server's flags say what samples and trains, with which model and on
which machine. Where both speak, the server's count.
"""

from __future__ import annotations

from collections.abc import Iterator

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.backends.vllm.command import JOB_ARGUMENTS, parse_flags
from fakevllm_server.config.model import ServerConfig

EVERYWHERE = {
    "base_yaml_config": "the SDK reads that file, a server does not",
    "ensure_new_experiment": "the SDK names experiments, a server does not",
    "experiment_dir": "all of a run lies in the server's --run-dir",
    "logging": "curves are in the server's run log",
    "train_print_to_markdown_file_path": "a step's numbers are in the server's run log",
    "val_print_to_markdown_file_path": "nothing is validated here",
    "swarm_mode": "clients always bring the episodes",
    "compute_madness_checklist": "answers are not looked at: let a reward do it",
    "mini_batch_num": "an update is over the whole batch; ppo_epochs makes more of them",
    "ulysses_sequence_parallel_size": "a sequence is on one GPU",
    "lora_load_format": "adapters are safetensors",
    "layered_summon": "adapters reach the engine merged into the weights",
}
"""Setting -> what counts instead, whatever the engine."""


def job_warnings(job: TrainJob, config: ServerConfig) -> list[str]:
    """One line each, of settings that are not at their default."""
    told = {**EVERYWHERE, **dict(_here(job, config))}
    return _lone(job) + [
        f"{name} = {getattr(job, name)!r} is without effect: {why}"
        for name, why in told.items()
        if getattr(job, name) != TrainJob.model_fields[name].default
    ]


def _lone(job: TrainJob) -> list[str]:
    if job.num_repeat > 1 or job.algorithm in NEEDS_GREEDY:
        return []
    return [
        "num_repeat = 1 trains nothing: a lone answer has none to be compared with; set 2 or more"
    ]


def _here(job: TrainJob, config: ServerConfig) -> Iterator[tuple[str, str]]:
    flag, trains = "backend", config.backend
    if config.trainer is not None or config.rollout is not None:
        flag, trains = "trainer", config.trainer_name
    if job.backbone not in (None, trains):
        yield "backbone", f"the server was started with --{flag} {trains}"
    if config.model not in (None, job.model):
        yield "model", f"the server was started with --model {config.model}"
    elif config.trainer_name == "fake":
        yield "model", "the fake engine has none"
    yield "n_gpu", "it is checked, and the server trains on the GPUs that it was given"
    if job.max_prompt_length is not None:
        yield "max_prompt_length", "it is checked, and longer prompts train too"
        if job.overlong_buffer_len is None:
            yield "max_response_length", "it is checked, and longer episodes train too"
    given = parse_flags(config.engine_args)
    for flag, setting in JOB_ARGUMENTS.items():
        if config.rollout_name != "vllm":
            yield setting, f"it is for vLLM, and --rollout is {config.rollout_name}"
        elif config.rollout_url is not None:
            yield setting, "that vLLM was started by somebody else"
        elif flag in given:
            yield setting, f"the server was started with --engine-arg=--{flag}"
