"""The training job that a client creates, from constructor arguments (with AgentJet's names) or
from YAML files.

    job = TrainJob(project_name="p", experiment_name="e", n_gpu=8, batch_size=32, num_repeat=4)
    job.dump_job_as_yaml("job.yaml")

The value of a setting is the constructor's argument. If the argument was not given, the value in
the file `base_yaml_config` is used. If the file has no value for the setting, the default is used.
A file may have fakevllm's format (with a section `job:`) or AgentJet's (with a section `ajet:`).
"""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationError

from fakevllm_adapters.job import model
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.job.yaml_reader import (
    Settings,
    describe_errors,
    merge_target_modules,
    parse_job_yaml,
    resolve_kl_loss,
)

log = logging.getLogger("fakevllm.sdk")

_NULLABLE = frozenset({"max_mismatch_k3"})
"""Settings for which None is a value. For any other setting, the argument None means that the
setting was not given."""
_CONSTRUCTOR_ONLY = frozenset({"base_yaml_config", "ensure_new_experiment"})
"""Settings that only the constructor uses."""


class TrainJob(model.TrainJob):
    """A training job. The constructor raises ValueError with a one-line message in three cases: a
    setting is invalid, settings cannot be combined, or a file cannot be read."""

    base_yaml_config: str | None = Field(default=None, exclude=True)
    ensure_new_experiment: bool = Field(default=False, exclude=True)

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**_resolve(settings, datetime.now()))
            except ValidationError as error:
                raise ValueError(describe_errors(error, type(self).model_fields)) from None
            check_job(self)

    def build_job_from_yaml(self, yaml_path: str | Path) -> Self:
        """Set this job's settings to those in the YAML file `yaml_path`, and return the job.
        Settings that the file does not contain stay unchanged.

        Jobs are otherwise immutable. This method changes the job itself, because scripts from
        AgentJet's documentation expect this.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set - _CONSTRUCTOR_ONLY}
        built = type(self)(**_override(own, _read(yaml_path)))
        for name in type(self).model_fields:
            object.__setattr__(self, name, getattr(built, name))  # the model is frozen
        self.model_fields_set.update(built.model_fields_set)
        return self

    def dump_job_as_yaml(self, yaml_path: str | Path) -> str:
        """Write the job as YAML to a file, and return the path. Folders that do not exist are
        created."""
        file = Path(yaml_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.as_yaml(), encoding="utf-8")
        return str(yaml_path)


def _resolve(arguments: Settings, now: datetime) -> Settings:
    """Return the constructor's arguments, completed with the settings of the file
    `base_yaml_config`. With `ensure_new_experiment`, the time is appended to the experiment's
    name."""
    settings = _set_values(arguments)
    base = settings.get("base_yaml_config")
    if base is not None:
        settings = _override(resolve_kl_loss(_read(base)), settings)
    if settings.get("ensure_new_experiment"):
        name = settings.get("experiment_name", "experiment")
        settings["experiment_name"] = f"{name}_{now:%Y%m%d-%H%M%S}"
    return settings


def _override(lower: Settings, upper: Settings) -> Settings:
    """Return one dict with the settings of both dicts. If both have a setting, the result has the
    value from `upper`."""
    return {**lower, **resolve_kl_loss(upper, lower)}


def _set_values(settings: Settings) -> Settings:
    """Return only the settings that were set. The setting `target_modules` and its aliases are
    merged into one."""
    values = {name: v for name, v in settings.items() if v is not None or name in _NULLABLE}
    return merge_target_modules(values)


def _read(file: str | Path) -> Settings:
    try:
        read = parse_job_yaml(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the job's YAML {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the job's YAML {file}: {error}") from None
    if "base_yaml_config" in read.settings:
        raise ValueError(f"the job's YAML {file} names a base_yaml_config: use one file")
    for warning in read.warnings:
        log.warning("%s: %s", file, warning)
    return _set_values(read.settings)
