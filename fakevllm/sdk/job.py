"""The job as an active client makes it: AgentJet's arguments, and YAML files beside them.

    job = TrainJob(project_name="p", experiment_name="e", n_gpu=8, batch_size=32, num_repeat=4)
    job.dump_job_as_yaml("job.yaml")

A setting is what the constructor was given, else what `base_yaml_config` says, else the default. A
file may be of either spelling, ours (`job:`) or AgentJet's (`ajet:`).
"""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationError

from fakevllm_adapters.job import model
from fakevllm_adapters.job.rules import check_job
from fakevllm_adapters.job.yaml import (
    Settings,
    describe_errors,
    merge_target_modules,
    parse_job_yaml,
)

log = logging.getLogger("fakevllm.sdk")

_NONE_COUNTS = frozenset({"max_mismatch_k3"})
"""Where None is a value of its own. Everywhere else it means: not given."""
_ONCE = frozenset({"base_yaml_config", "ensure_new_experiment"})
"""What has been done when the job is made."""


class TrainJob(model.TrainJob):
    """Raises ValueError, in one line, for a job that cannot work or a file that cannot be read."""

    base_yaml_config: str | None = Field(default=None, exclude=True)
    ensure_new_experiment: bool = Field(default=False, exclude=True)

    if not TYPE_CHECKING:  # whose word for it is one argument a setting

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**_resolved(given, datetime.now()))
            except ValidationError as error:
                raise ValueError(describe_errors(error, type(self).model_fields)) from None
            check_job(self)

    def build_job_from_yaml(self, yaml_path: str | Path) -> Self:
        """The file's settings over this job's, also over what its constructor was given. In place,
        for AgentJet's documents call it for that; returned for whoever wants it in a line."""
        own = {name: getattr(self, name) for name in self.model_fields_set - _ONCE}
        built = type(self)(**{**own, **_read(yaml_path)})
        for name in type(self).model_fields:
            object.__setattr__(self, name, getattr(built, name))  # frozen for everybody else
        self.model_fields_set.update(built.model_fields_set)
        return self

    def dump_job_as_yaml(self, yaml_path: str | Path) -> str:
        """Writes `as_yaml()`, and returns the path. Folders on the way are made."""
        file = Path(yaml_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.as_yaml(), encoding="utf-8")
        return str(yaml_path)


def _resolved(given: Settings, now: datetime) -> Settings:
    """With the base file below what was given, and the experiment's own name."""
    settings = _named(given)
    base = settings.get("base_yaml_config")
    if base is not None:
        settings = {**_read(base), **settings}
    if settings.get("ensure_new_experiment"):
        name = settings.get("experiment_name", "experiment")
        settings["experiment_name"] = f"{name}_{now:%Y%m%d-%H%M%S}"
    return settings


def _named(settings: Settings) -> Settings:
    """Without what was not given."""
    named = {name: v for name, v in settings.items() if v is not None or name in _NONE_COUNTS}
    return merge_target_modules(named)


def _read(file: str | Path) -> Settings:
    try:
        read = parse_job_yaml(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the job's YAML {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the job's YAML {file}: {error}") from None
    if "base_yaml_config" in read.settings:
        raise ValueError(f"the job's YAML {file} names a base_yaml_config: give one file")
    for warning in read.warnings:
        log.warning("%s: %s", file, warning)
    return _named(read.settings)
