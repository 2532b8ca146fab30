"""Reads the YAML file of `fakevllm-server start --config FILE`, which sets flags of the command
line. An example of a file:

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
    """The type of a flag's value. The values of the enum are texts for error messages."""

    TEXT = "a text"
    NUMBER = "a whole number"
    SWITCH = "true or false"
    LIST = "a list of texts"


def flag_types(command: Callable[..., object]) -> dict[str, FlagType]:
    """Return the type of each parameter of a Typer command, taken from the parameter's annotation.

    A parameter whose annotation is not a number, a boolean or a list has the type TEXT.
    """
    by_annotation = {
        int: FlagType.NUMBER,
        bool: FlagType.SWITCH,
        list[str]: FlagType.LIST,
        list[str] | None: FlagType.LIST,
    }
    hints = get_type_hints(command)
    del hints["return"]
    return {name: by_annotation.get(hint, FlagType.TEXT) for name, hint in hints.items()}


def read_config_file(file: Path, flags: Mapping[str, FlagType]) -> dict[str, Any]:
    """Read a YAML configuration file, and return its values. The keys are the names of the flags
    with underscores.

    `flags` are the flags that the file may set. Raises ConfigError if the file cannot be read, is
    not a valid YAML mapping, or has an invalid key or value.
    """
    import yaml

    from fakevllm_adapters.job import strict_yaml_loader

    try:
        document: object = strict_yaml_loader.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The file {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        position = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(
            f"{file} is not valid YAML{position}: write one `flag: value` per line."
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file} is not a YAML mapping: write one `flag: value` per line.")
    return check_values(cast("dict[object, object]", document), file, flags)


def check_values(
    values: Mapping[object, object], file: Path, flags: Mapping[str, FlagType]
) -> dict[str, Any]:
    """Check the keys and values of a configuration file. Return the values by flag name, with
    underscores in the names.

    Raises ConfigError for the first key that is unknown, occurs twice or has a value of the wrong
    type.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            known = [flag.replace("_", "-") for flag in flags]
            closest = closest_name(name.replace("_", "-"), known)
            hint = f"known keys are {', '.join(known)}" if closest is None else f"write {closest}"
            raise ConfigError(f"Unknown key `{key}` in {file}: {hint}.")
        if name in result:
            raise ConfigError(
                f"`{key}` occurs twice in {file}, with a dash and with an underscore: remove one."
            )
        if not _has_type(value, flags[name]):
            hint = (
                ": put it in quotes" if _is_number(value) and flags[name] is FlagType.TEXT else ""
            )
            raise ConfigError(
                f"`{key}` in {file} must be {flags[name].value}, got {_describe(value)}{hint}."
            )
        result[name] = value
    return result


def _has_type(value: object, flag_type: FlagType) -> bool:
    match flag_type:
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _describe(value: object) -> str:
    return "nothing" if value is None else repr(value)
