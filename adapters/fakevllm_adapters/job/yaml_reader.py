"""Read a training job's YAML. The YAML has the mapping `job:` or, in AgentJet's form, the mapping
`ajet:`.

In the mapping `job:`, the settings have the same names as in TrainJob. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from fakevllm_adapters.http.validation_messages import SHOWN_CHARS, closest_name, problem_text
from fakevllm_adapters.job import ajet_yaml
from fakevllm_adapters.job.unused_settings import NEVER_USED

Settings = dict[str, Any]

_TARGETS, _AJET_TARGETS = "target_modules", "lora_target_modules"
_USE_KL_LOSS = "use_kl_loss"
_NO_KL_LOSS = {"kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"}
"""The KL settings of a job whose loss has no KL term. The values are TrainJob's defaults."""
AJET_KL_LOSS_COEF = 0.002
"""AgentJet's default weight of the loss's KL term."""


@dataclass(frozen=True, slots=True)
class RawJob:
    """The settings in a job's YAML, before they are validated."""

    settings: Settings
    keys: Mapping[str, str]
    """For each setting that has a different name in the YAML: the setting's key in the YAML."""
    warnings: list[str] = field(default_factory=list[str])


def parse_job_yaml(text: str) -> RawJob:
    """Return the settings in a job's YAML without validating them.

    The text must be a YAML mapping with exactly one of the keys `job` and `ajet`. Raises ValueError
    with a one-line message for any other text.
    """
    whole = _mapping_of(text)
    if len({"job", "ajet"} & whole.keys()) != 1:
        raise ValueError(
            "expected a YAML mapping with the key `job`, or AgentJet's `ajet`, not both"
        )
    if "ajet" in whole:
        settings, warnings = ajet_yaml.read_ajet_settings(whole)
        return RawJob(settings, ajet_yaml.AJET_KEYS, warnings)
    if not isinstance(whole["job"], dict):
        raise ValueError("expected a mapping below `job`")
    return RawJob(cast(Settings, whole["job"]), {})


def merge_target_modules(value: Any) -> Any:
    """Rename AgentJet's setting `lora_target_modules` to `target_modules`.

    If `value` is not a dict, return it unchanged. Raises ValueError if both names are set, to
    different values.

    >>> merge_target_modules({"lora_target_modules": "q_proj"})
    {'target_modules': 'q_proj'}
    """
    if not isinstance(value, dict) or _AJET_TARGETS not in value:
        return cast(object, value)
    settings = cast(Settings, value)
    rest = {name: value for name, value in settings.items() if name != _AJET_TARGETS}
    if rest.setdefault(_TARGETS, settings[_AJET_TARGETS]) != settings[_AJET_TARGETS]:
        raise ValueError(f"{_TARGETS} and {_AJET_TARGETS} are one setting: set only one")
    return rest


def resolve_kl_loss(value: Any, lower: Settings | None = None) -> Any:
    """Replace AgentJet's switch `use_kl_loss` by the weight `kl_loss_coef`.

    If the switch is False, the weight becomes 0, even if `kl_loss_coef` is set. If the switch is
    True, a weight in `value` is kept. Without it, the weight is taken from `lower` (the settings
    that `value` overrides), if it is above 0 there. Otherwise the weight is AgentJet's default. If
    the switch is absent or None, the weight stays as it is. If `value` is not a dict, return it
    unchanged. Raises ValueError for any other value of the switch.

    >>> resolve_kl_loss({"use_kl_loss": True}), resolve_kl_loss({"lr": 0.1})
    ({'kl_loss_coef': 0.002}, {'lr': 0.1})
    """
    if not isinstance(value, dict) or _USE_KL_LOSS not in value:
        return cast(object, value)
    settings = cast(Settings, value)
    rest = {name: value for name, value in settings.items() if name != _USE_KL_LOSS}
    is_on = settings[_USE_KL_LOSS]
    if is_on is None:
        return rest
    if not isinstance(is_on, bool):
        raise ValueError(f"{_USE_KL_LOSS} must be true or false, got {repr(is_on)[:SHOWN_CHARS]}")
    if not is_on:
        return rest | _NO_KL_LOSS
    if rest.get("kl_loss_coef") is None:
        rest["kl_loss_coef"] = (lower or {}).get("kl_loss_coef") or AJET_KL_LOSS_COEF
    return rest


def describe_errors(
    error: ValidationError, settings: Iterable[str], keys: Mapping[str, str] | None = None
) -> str:
    """Return one line that describes every validation error. The line names each setting as the
    user spelt it.

    `settings` has the names of all settings. For an unknown name, the line suggests the closest
    name in `settings`. `keys` has the user's spelling of each setting whose spelling differs from
    its name.
    """
    return "; ".join(
        _describe(problem, settings, keys or {}) for problem in error.errors(include_url=False)
    )


def _describe(problem: Any, settings: Iterable[str], keys: Mapping[str, str]) -> str:
    name, *inside = [str(part) for part in problem["loc"]] or [""]
    if not name:
        return str(problem["msg"]).removeprefix("Value error, ")
    where = repr(".".join([keys.get(name, name), *inside]))[1:-1][:SHOWN_CHARS]
    if problem["type"] == "extra_forbidden":
        closest = closest_name(name, settings, NEVER_USED)
        fix = "take it out" if closest is None else f"take it out, or write {closest}"
        return f"{where} is no setting of a job: {fix}"
    return f"{where}: {problem_text(problem)}"


def _mapping_of(text: str) -> dict[str, Any]:
    # Imported here, because most commands have a job but read no YAML.
    import yaml

    from fakevllm_adapters.job import strict_yaml_loader

    try:
        loaded: Any = strict_yaml_loader.loads(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    return cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}
