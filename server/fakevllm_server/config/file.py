"""`start --config FILE`: flags of the command line, written down as YAML.

backend: vllm
engine-arg: [--max-model-len=4096]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_type_hints

from fakevllm_adapters.http.validation_messages import closest_name
from fakevllm_server.config.model import ConfigError


class FlagType(Enum):
    """What a flag takes; the value is its name for users."""

    TEXT = "a text"
    NUMBER = "a whole number"
    SWITCH = "true or false"
    LIST = "a list of texts"


def flag_types(command: Callable[..., object]) -> dict[str, FlagType]:
    """Of each parameter of a command line's function, by its annotation."""
    of_type = {
        int: FlagType.NUMBER,
        bool: FlagType.SWITCH,
        list[str]: FlagType.LIST,
        list[str] | None: FlagType.LIST,
    }
    hints = get_type_hints(command)
    del hints["return"]
    return {name: of_type.get(hint, FlagType.TEXT) for name, hint in hints.items()}


def read(file: Path, flags: Mapping[str, FlagType]) -> dict[str, Any]:
    """Values by the flags' names with underscores. `flags` are those a file may set. Raises
    ConfigError."""
    import yaml

    from fakevllm_adapters.job import strict_yaml

    try:
        document: object = strict_yaml.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The file {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{file} is not YAML{place}: write one `flag: value` a line.") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file} must hold one `flag: value` a line.")
    return checked(cast("dict[object, object]", document), file, flags)


def checked(
    values: Mapping[object, object], file: Path, flags: Mapping[str, FlagType]
) -> dict[str, Any]:
    """Raises ConfigError for the first key that is none, or is twice, or has a wrong value."""
    taken: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            known = [flag.replace("_", "-") for flag in flags]
            meant = closest_name(name.replace("_", "-"), known)
            mend = f"known are {', '.join(known)}" if meant is None else f"write {meant}"
            raise ConfigError(f"Unknown key `{key}` in {file}: {mend}.")
        if name in taken:
            raise ConfigError(f"`{key}` is twice in {file}: with a dash and with an underscore.")
        if not _fits(value, flags[name]):
            hint = (
                ": put it in quotes" if _is_scalar(value) and flags[name] is FlagType.TEXT else ""
            )
            raise ConfigError(
                f"`{key}` in {file} must be {flags[name].value}, got {_shown(value)}{hint}."
            )
        taken[name] = value
    return taken


def _fits(value: object, kind: FlagType) -> bool:
    match kind:
        case FlagType.TEXT:
            return isinstance(value, str)
        case FlagType.NUMBER:
            return isinstance(value, int) and not isinstance(value, bool)
        case FlagType.SWITCH:
            return isinstance(value, bool)
        case FlagType.LIST:
            return isinstance(value, list) and all(
                isinstance(part, str) for part in cast("list[object]", value)
            )


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float)


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)
