"""Warnings about settings of a training job that have no effect on this server. This module does no
I/O.

A client sends the job, which says how to train. The server's own flags decide about the engines,
the model and the machine. If a flag and the job disagree about a setting, the flag wins.
"""

from __future__ import annotations

from collections.abc import Iterator

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.unused_settings import NEVER_USED
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.backends.vllm.command import JOB_ARGUMENTS, parse_flags
from fakevllm_server.config.model import ServerConfig


def job_warnings(job: TrainJob, config: ServerConfig) -> list[str]:
    """Return one warning line for each setting of the job that has no effect on this server.
    Settings with their default value cause no warning."""
    unused = {**NEVER_USED, **dict(_unused_here(job, config))}
    return _single_answer_warning(job) + [
        f"{name} = {getattr(job, name)!r} is without effect: {explanation}"
        for name, explanation in unused.items()
        if getattr(job, name) != TrainJob.model_fields[name].default
    ]


def _single_answer_warning(job: TrainJob) -> list[str]:
    """Return a list with one warning if the job samples only one answer for each request, so that
    no answers can be compared. Return [] for all other jobs, and for ReMax, which compares the
    single answer with a greedy answer."""
    if job.num_repeat > 1 or job.algorithm in NEEDS_GREEDY:
        return []
    return [
        "num_repeat = 1 trains nothing: a single answer cannot be compared with others; set 2 or "
        "more"
    ]


def _unused_here(job: TrainJob, config: ServerConfig) -> Iterator[tuple[str, str]]:
    """Yield a pair (name of the setting, reason) for each setting of a job that this server does
    not use."""
    flag, trainer = "backend", config.backend
    if config.trainer is not None or config.rollout is not None:
        flag, trainer = "trainer", config.trainer_name
    if job.backbone not in (None, trainer):
        yield "backbone", f"the server was started with --{flag} {trainer}"
    if config.models_dir is None and config.model not in (None, job.model):
        yield "model", f"the server was started with --model {config.model}"
    elif config.trainer_name == "fake":
        yield "model", "the fake engine has no model"
    yield "n_gpu", "it is only checked; the server trains on the GPUs that it was given"
    if job.max_prompt_length is not None:
        yield "max_prompt_length", "it is only checked; longer prompts are trained too"
        if job.overlong_buffer_len is None:
            yield "max_response_length", "it is only checked; longer episodes are trained too"
    flags = parse_flags(config.engine_args)
    for flag, setting in JOB_ARGUMENTS.items():
        if config.rollout_name != "vllm":
            yield setting, f"only vLLM uses it, and --rollout is {config.rollout_name}"
        elif config.rollout_url is not None:
            yield setting, "the vLLM at --rollout-url was not started by this server"
        elif flag in flags:
            yield setting, f"the server was started with --engine-arg=--{flag}"
