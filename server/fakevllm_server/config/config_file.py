"""Read the configuration file of `fakevllm-server start --config FILE`. The file sets command-line
flags. An example of a YAML file:

backend: vllm
engine-arg: [--max-model-len=4096]

In a file whose name ends in `.toml`, the flags are in the table `[server]`. The table `[tracking]`
has further names for the flags about curves (TRACKING_FLAGS). The file may have further tables,
which the server does not read. So server and proxy can share one `fakevllm.toml`. The one exception
is the table `[job]`, which the server checks before it starts. The job itself comes from the proxy.

The section `cluster` (in a TOML file the table `[server.cluster]`) divides the GPUs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import ValidationError

from fakevllm_adapters.http.validation_messages import closest_name
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.job.yaml_reader import describe_errors
from fakevllm_runtime.errors import ConfigError
from fakevllm_server.placement.cluster_section import ClusterSection

TOML_SUFFIX = ".toml"
TRACK = "track"
"""Flag for the trackers."""
NO_TRACKER = "none"
"""Value of this flag for no tracker."""


class FlagType(Enum):
    """The type of a flag's value. The values of the enum are texts for error messages."""

    TEXT = "a text"
    NUMBER = "a whole number"
    SWITCH = "true or false"
    LIST = "a list of texts"
    TEXTS = "a text or a list of texts"
    AMOUNT = "a number"
    TABLE = "a table of settings"


CLUSTER = "cluster"
"""Key of the section that divides the GPUs."""
CLUSTER_KEYS = dict.fromkeys((field.name for field in fields(ClusterSection)), FlagType.NUMBER) | {
    "colocate": FlagType.TEXT,
    "ray_address": FlagType.TEXT,
    "gpu_memory_gib": FlagType.AMOUNT,
}
"""The keys of this section, with the types of their values."""


TRACKING_FLAGS: Mapping[str, tuple[str, FlagType]] = {
    "to": (TRACK, FlagType.LIST),
    "samples": ("track_samples", FlagType.NUMBER),
    "samples_every": ("track_samples_every", FlagType.NUMBER),
}
"""Keys of the table `[tracking]`, with the flags that they set."""


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
    not valid, or has an invalid key or value.
    """
    text = _read_text(file)
    if file.suffix == TOML_SUFFIX:
        document = _parse_toml(text, file)
        values = check_values(_server_table(document, file), f"[server] of {file}", flags)
        values |= _tracking(document, file, values)
    else:
        values = check_values(_parse_yaml(text, file), str(file), flags)
    # An empty list cannot be told from a missing flag later.
    return values | ({TRACK: [NO_TRACKER]} if values.get(TRACK) == [] else {})


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: save it as UTF-8.") from None


def read_cluster(values: Mapping[object, object], file: Path) -> ClusterSection:
    """Return the section `cluster` of a configuration file. Raises ConfigError for an unknown key,
    a value of the wrong type, a missing key, or a division that the GPUs do not allow."""
    source = f"[server.cluster] of {file}" if file.suffix == TOML_SUFFIX else f"cluster of {file}"
    settings = check_values(values, source, CLUSTER_KEYS)
    for key in ("gpus_per_node", "training_gpus"):
        if key not in settings:
            raise ConfigError(f"`{key}` is missing in {source}: add it, such as {key} = 1.")
    return ClusterSection(**settings)


def read_job(file: Path) -> TrainJob | None:
    """Return the job in the table `[job]` of a TOML file. Return None for a file without this
    table, and for a YAML file. Raises ConfigError for an invalid setting."""
    if file.suffix != TOML_SUFFIX:
        return None
    table: object = _parse_toml(_read_text(file), file).get("job")
    if table is None:
        return None
    try:
        return check_job(TrainJob.model_validate(table))
    except ValidationError as error:
        message = describe_errors(error, TrainJob.model_fields)
    except ValueError as error:
        message = str(error)
    raise ConfigError(f"[job] of {file}: {message}")


def _parse_toml(text: str, file: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from None


def _server_table(document: Mapping[str, object], file: Path) -> Mapping[object, object]:
    table: object = document.get("server")
    if not isinstance(table, dict):
        raise ConfigError(
            f"{file} has no table [server]: add one, with the flags of `fakevllm-server start` as "
            'keys, such as model = "demo".'
        )
    return cast("dict[object, object]", table)


def _tracking(
    document: Mapping[str, object], file: Path, server: Collection[str]
) -> dict[str, Any]:
    """Return the values of the flags that the table `[tracking]` sets, by the flags' names. Return
    {} without this table. `server` has the names of the flags that `[server]` sets."""
    table: object = document.get("tracking")
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(
            f'`tracking` in {file} is not a table: write [tracking], and to = ["wandb"] below it.'
        )
    source = f"[tracking] of {file}"
    types = {key: flag_type for key, (_, flag_type) in TRACKING_FLAGS.items()}
    values = check_values(cast("dict[object, object]", table), source, types)
    for key in values:
        flag = TRACKING_FLAGS[key][0]
        if flag in server:
            name = flag.replace("_", "-")
            raise ConfigError(
                f"{file} sets `{name}` in [server] and `{key}` in [tracking]: remove one."
            )
    return {TRACKING_FLAGS[key][0]: value for key, value in values.items()}


def _parse_yaml(text: str, file: Path) -> Mapping[object, object]:
    import yaml

    from fakevllm_adapters.job import strict_yaml_loader

    try:
        document: object = strict_yaml_loader.loads(text)
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
    return cast("dict[object, object]", document)


def check_values(
    values: Mapping[object, object], source: str, flags: Mapping[str, FlagType]
) -> dict[str, Any]:
    """Check the keys and values of a configuration file. Return the values by flag name, with
    underscores in the names. `source` names the file in error messages.

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
            raise ConfigError(f"Unknown key `{key}` in {source}: {hint}.")
        if name in result:
            raise ConfigError(
                f"`{key}` occurs twice in {source}, with a dash and with an underscore: remove one."
            )
        if not _has_type(value, flags[name]):
            hint = (
                ": put it in quotes" if _is_number(value) and flags[name] is FlagType.TEXT else ""
            )
            raise ConfigError(
                f"`{key}` in {source} must be {flags[name].value}, got {_describe(value)}{hint}."
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
        case FlagType.AMOUNT:
            return _is_number(value) and not isinstance(value, bool)
        case FlagType.TABLE:
            return isinstance(value, dict)
        case FlagType.LIST:
            return _is_list_of_texts(value)
        case FlagType.TEXTS:
            return isinstance(value, str) or _is_list_of_texts(value)


def _is_list_of_texts(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(part, str) for part in cast("list[object]", value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _describe(value: object) -> str:
    return "nothing" if value is None else repr(value)
