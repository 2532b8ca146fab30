"""The spellings of a job: `job:` with our names below it, or AgentJet's `ajet:`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import yaml
from pydantic import ValidationError

from fakevllm_adapters.http.validation_messages import SHOWN_CHARS, closest_name, problem_text
from fakevllm_adapters.job import ajet_yaml, plain_yaml

Settings = dict[str, Any]

_TARGETS, _TARGETS_THERE = "target_modules", "lora_target_modules"


@dataclass(frozen=True, slots=True)
class Written:
    """A job as it was written, not checked yet."""

    settings: Settings
    keys: Mapping[str, str]
    """Setting -> how it is spelt there, where that is not its name."""
    warnings: list[str] = field(default_factory=list[str])


def written(text: str) -> Written:
    """Raises ValueError, in one line, for anything but a YAML mapping with one of the keys."""
    whole = _mapping_of(text)
    if len({"job", "ajet"} & whole.keys()) != 1:
        raise ValueError(
            "expected a YAML mapping with the key `job`, or AgentJet's `ajet`, not both"
        )
    if "ajet" in whole:
        settings, warnings = ajet_yaml.settings_of(whole)
        return Written(settings, ajet_yaml.KEYS, warnings)
    if not isinstance(whole["job"], dict):
        raise ValueError("expected a mapping below `job`")
    return Written(cast(Settings, whole["job"]), {})


def under_one_name(given: Any) -> Any:
    """`lora_target_modules`, as AgentJet has it, is `target_modules`. Raises ValueError where they
    differ.

    >>> under_one_name({"lora_target_modules": "q_proj"})
    {'target_modules': 'q_proj'}
    """
    if not isinstance(given, dict) or _TARGETS_THERE not in given:
        return cast(object, given)
    settings = cast(Settings, given)
    rest = {name: value for name, value in settings.items() if name != _TARGETS_THERE}
    if rest.setdefault(_TARGETS, settings[_TARGETS_THERE]) != settings[_TARGETS_THERE]:
        raise ValueError(f"{_TARGETS} and {_TARGETS_THERE} are one setting: name it once")
    return rest


def one_line(
    error: ValidationError, settings: Iterable[str], keys: Mapping[str, str] | None = None
) -> str:
    """Every mistake, each with the setting as its user spelt it. `settings` are those there are."""
    return "; ".join(
        _told(problem, settings, keys or {}) for problem in error.errors(include_url=False)
    )


def _told(problem: Any, settings: Iterable[str], keys: Mapping[str, str]) -> str:
    name, *inside = [str(part) for part in problem["loc"]] or [""]
    if not name:
        return str(problem["msg"]).removeprefix("Value error, ")
    where = repr(".".join([keys.get(name, name), *inside]))[1:-1][:SHOWN_CHARS]
    if problem["type"] == "extra_forbidden":
        meant = closest_name(name, settings)
        mend = "take it out" if meant is None else f"take it out, or write {meant}"
        return f"{where} is no setting of a job: {mend}"
    return f"{where}: {problem_text(problem)}"


def _mapping_of(text: str) -> dict[str, Any]:
    try:
        loaded: Any = plain_yaml.loads(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    return cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}
