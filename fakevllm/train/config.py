"""The YAML file of `fakevllm train`.

The file has the sections `train:` and `server:`. The training job is in a section `job:`, or in a
section `ajet:` with AgentJet's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from fakevllm.config.base import Section
from fakevllm.config.errors import explain
from fakevllm.errors import ConfigError
from fakevllm.sdk.job import TrainJob
from fakevllm.sdk.protocol import normalized_server_url
from fakevllm_adapters.job import strict_yaml_loader
from fakevllm_adapters.job.model import parse_job
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.job.yaml_reader import parse_job_yaml

SECTIONS = ("job", "train", "server")
"""Top-level keys of a file that has a section `job:`. A file with a section `ajet:` may have
further keys, which are for AgentJet."""


class TrainSection(Section):
    workflow: str
    """The Python function that runs one episode, written as `agent.py:run`. All paths in this
    section are relative to the YAML file."""
    dataset: str
    """The tasks: a JSON Lines file, a CSV file, or a function that returns tasks, written as
    `agent.py:tasks`."""
    eval_dataset: str | None = None
    """Dataset for the evaluations before and after training. The model is never trained on this
    dataset."""
    field: str = "question"
    """Column of the dataset that contains the text of the task."""
    epochs: int | None = Field(default=None, ge=1)
    """Maximum number of passes over the dataset. Training ends sooner if `job.total_training_steps`
    is reached first."""
    max_parallel: int = Field(default=16, ge=1)
    """Maximum number of episodes that run at once."""


class ServerSection(Section):
    url: Annotated[str, AfterValidator(normalized_server_url)] | None = None
    """URL of a server that is running already. If it is set, no other key of this section may be
    set."""
    backend: Literal["embedded", "vllm", "verl", "fake"] = "embedded"
    model: str | None = None
    """Model that the server loads, as in its flag `--model`. It overrides the job's model."""
    run_dir: Path | None = None
    """Run directory, relative to the current folder. The default for a file NAME.yaml is
    runs/NAME."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on which the server listens; 0 means any free port."""
    flags: tuple[str, ...] = ()
    """Further flags for `fakevllm-server start`."""

    @model_validator(mode="after")
    def _check_single_server(self) -> Self:
        if self.url is not None and len(self.model_fields_set) > 1:
            others = ", ".join(sorted(self.model_fields_set - {"url"}))
            raise ValueError(f"server.url names a running server: remove {others}")
        return self


class TrainFile(Section):
    """The sections `train` and `server` of the YAML file. The job is in a section of its own."""

    train: TrainSection
    server: ServerSection = ServerSection()


@dataclass(frozen=True, slots=True)
class Settings:
    """The validated settings of one run."""

    file: Path
    job: TrainJob
    train: TrainSection
    server: ServerSection
    warnings: list[str] = field(default_factory=list[str])
    """Warnings about ignored keys of the job."""

    @property
    def run_dir(self) -> Path | None:
        """Run directory of the server that `fakevllm train` starts. None if the YAML file has the
        URL of a running server, because no server is started then."""
        if self.server.url is not None:
            return None
        return self.server.run_dir or Path("runs") / self.file.stem


def load(file: Path) -> Settings:
    """Load and validate the YAML file. Raises ConfigError with a one-line message that says how to
    fix the file."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The file {file} cannot be read: {reason}.") from None
    try:
        job, warnings = _parse_job(text)
    except ValueError as error:
        raise ConfigError(f"The job in {file}: {error}.") from None
    try:
        sections = TrainFile.model_validate(_sections(text, file))
    except ValidationError as error:
        raise ConfigError(explain(error, file, frozenset(), TrainFile)) from None
    return Settings(file, job, sections.train, sections.server, warnings)


def _parse_job(text: str) -> tuple[TrainJob, list[str]]:
    """Return the training job, and warnings about ignored keys of the job. Raises ValueError if the
    job is invalid, or if `fakevllm train` does not support the job."""
    try:
        warnings = parse_job(text).warnings
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    job = TrainJob(**parse_job_yaml(text).settings)  # includes the settings of a base file
    check_job(job)
    if job.lockstep:
        raise ValueError(
            "lockstep works only for requests through a proxy, not for episodes: remove it, or use "
            "`fakevllm replay --lockstep`"
        )
    if job.num_repeat < 2:
        raise ValueError(
            "num_repeat is 1, but a group needs at least two episodes to compare: set it to 2 or "
            "more"
        )
    if "agree" in job.swarm_mode_sample_collection_method:
        raise ValueError(
            f"swarm_mode_sample_collection_method {job.swarm_mode_sample_collection_method} waits "
            "for clients to agree, which `fakevllm train` does not do: remove it"
        )
    return job, warnings


def _sections(text: str, file: Path) -> dict[str, Any]:
    """Return a dict with the sections `train` and `server` of a YAML text.

    If the text has a section `ajet:`, unknown sections are ignored, because AgentJet's own programs
    use them. In any other text, an unknown section raises ConfigError. A missing section `train` or
    a malformed section also raises ConfigError. `file` is the file's path for the error messages.
    """
    content = cast("dict[str, Any]", strict_yaml_loader.loads(text))
    unknown = [] if "ajet" in content else [name for name in content if name not in SECTIONS]
    if unknown:
        raise ConfigError(
            f"Unknown key `{unknown[0]}` in {file}: the known keys are {', '.join(SECTIONS)}."
        )
    if not isinstance(content.get("train"), dict):
        raise ConfigError(
            f"{file} has no section `train`: add it, with the keys `workflow` and `dataset`."
        )
    server: Any = content.get("server") or {}
    if not isinstance(server, dict):
        raise ConfigError(
            f"`server` in {file} must be a section: write `server:` and its keys below it."
        )
    return {"train": content["train"], "server": server}
