"""The file of `fakevllm train`: `job:` or AgentJet's `ajet:`, `train:` and `server:`."""

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
from fakevllm_adapters.job import strict_yaml
from fakevllm_adapters.job.model import parse_job
from fakevllm_adapters.job.rules import check_job
from fakevllm_adapters.job.yaml import parse_job_yaml

OURS = ("job", "train", "server")


class TrainSection(Section):
    workflow: str
    """`agent.py:run`: the function that plays one episode. Files of this section are looked for
    beside the file that names them."""
    dataset: str
    """JSON Lines, CSV, or `agent.py:tasks`, a function that makes tasks."""
    eval_dataset: str | None = None
    """Played once before and once after, and not trained."""
    field: str = "question"
    """Of the rows' text."""
    epochs: int | None = Field(default=None, ge=1)
    """Times through the dataset, where job.total_training_steps does not end it sooner."""
    max_parallel: int = Field(default=16, ge=1)
    """Episodes that run at a time."""


class ServerSection(Section):
    url: Annotated[str, AfterValidator(normalized_server_url)] | None = None
    """Of one that runs already; then nothing else stands here."""
    backend: Literal["embedded", "vllm", "verl", "fake"] = "embedded"
    model: str | None = None
    """As `--model`; it wins over the job's."""
    run_dir: Path | None = None
    """Below the folder the command runs in; runs/NAME for NAME.yaml."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free one."""
    flags: tuple[str, ...] = ()
    """Further ones of `fakevllm-server start`."""

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if self.url is not None and len(self.model_fields_set) > 1:
            others = ", ".join(sorted(self.model_fields_set - {"url"}))
            raise ValueError(f"server.url names a server that runs already: take out {others}")
        return self


class TrainFile(Section):
    """What is ours beside the job."""

    train: TrainSection
    server: ServerSection = ServerSection()


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of the command, checked."""

    file: Path
    job: TrainJob
    train: TrainSection
    server: ServerSection
    warnings: list[str] = field(default_factory=list[str])
    """What the job asks for and no setting stands for."""

    @property
    def run_dir(self) -> Path | None:
        """None where the server is somebody else's."""
        if self.server.url is not None:
            return None
        return self.server.run_dir or Path("runs") / self.file.stem


def load(file: Path) -> Settings:
    """Raises ConfigError, in one line that names the mend."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"The file {file} cannot be read: {said}.") from None
    try:
        job, warnings = _job(text)
    except ValueError as error:
        raise ConfigError(f"The job in {file}: {error}.") from None
    try:
        ours = TrainFile.model_validate(_ours(text, file))
    except ValidationError as error:
        raise ConfigError(explain(error, file, frozenset(), TrainFile)) from None
    return Settings(file, job, ours.train, ours.server, warnings)


def _job(text: str) -> tuple[TrainJob, list[str]]:
    """Raises ValueError."""
    try:
        warnings = parse_job(text).warnings
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    job = TrainJob(**parse_job_yaml(text).settings)  # with its base file
    check_job(job)
    if job.lockstep:
        raise ValueError(
            "lockstep trains what a proxy asks and no episodes: take it out, or use "
            "`fakevllm replay --lockstep`"
        )
    if job.num_repeat < 2:
        raise ValueError(
            "num_repeat 1 plays each task once, and a single episode is compared with nothing: set "
            "it to 2 or more"
        )
    if "agree" in job.swarm_mode_sample_collection_method:
        raise ValueError(
            f"swarm_mode_sample_collection_method {job.swarm_mode_sample_collection_method} waits "
            "for clients to agree, and here nobody asks them: take it out"
        )
    return job, warnings


def _ours(text: str, file: Path) -> dict[str, Any]:
    """Without the job. What else stands in AgentJet's file is for its own programs."""
    whole = cast("dict[str, Any]", strict_yaml.loads(text))
    unknown = [] if "ajet" in whole else [name for name in whole if name not in OURS]
    if unknown:
        raise ConfigError(
            f"Unknown key `{unknown[0]}` in {file}: known here are {', '.join(OURS)}."
        )
    if not isinstance(whole.get("train"), dict):
        raise ConfigError(
            f"{file} has no section `train`: say there which `workflow` plays which `dataset`."
        )
    server: Any = whole.get("server") or {}
    if not isinstance(server, dict):
        raise ConfigError(
            f"`server` in {file} is a section: write `server:` and its keys below it."
        )
    return {"train": whole["train"], "server": server}
