"""The settings of the proxy as a list, with the place from which each value came. The functions do
no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from fakevllm.config.model import Config

SET, NOT_SET = "set", "not set"
"""Texts that are shown in place of a secret."""
ENVIRONMENT_VARIABLES = {
    "swarm.key": "FAKEVLLM_SWARM_KEY",
    "fallback.key": "FAKEVLLM_FALLBACK_KEY",
}
"""Environment variable for each setting that can be set by one."""
_SECRET_NAME = re.compile(r"(^|(?<!_per)[._-])(key|token|secret|password)$", re.IGNORECASE)
"""A name such as `swarm.key`. The setting `limits.num_open_per_key` is a number of requests."""
_SECRET_SETTINGS = ("alerts.url",)
"""Settings that are secret although their names do not say so. Whoever knows the address of an
incoming webhook of Slack can write to its channel."""
_SECRET_ADDRESS = re.compile(r"://[^/\s]*@")
"""An address with a password."""
_SECRET_FLAG = re.compile(r"[-_](key|token|secret|password)\b", re.IGNORECASE)
"""A flag for another program, such as `--api-key`."""


class Origin(StrEnum):
    """The place from which the value of a setting came."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class SettingSources:
    """The places from which a configuration was read."""

    file: Path | None = None
    """The configuration file; None if there was none."""
    flags: frozenset[str] = frozenset()
    """Settings that the command line or the environment has set, such as `proxy.port`."""
    environment: frozenset[str] = field(default=frozenset())
    """Those of `flags` whose values came from the environment."""

    def origin(self, key: str, *, is_set: bool) -> Origin:
        """Return the origin of one setting. `is_set` says whether any place has set it."""
        if key in self.environment:
            return Origin.ENVIRONMENT
        if key in self.flags:
            return Origin.COMMAND_LINE
        return Origin.FILE if is_set else Origin.DEFAULT


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as text, with the place from which its value came."""

    key: str
    value: str
    """The value as JSON. For a secret, SET or NOT_SET."""
    origin: Origin


def sources_of(
    file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, str],
) -> SettingSources:
    """Return the sources of a configuration. As for `load`, `flags` has the values of the command
    line and those of the environment.

    >>> sources = sources_of(None, {"swarm": {"key": "k"}}, {"FAKEVLLM_SWARM_KEY": "k"})
    >>> sources.origin("swarm.key", is_set=True).value
    'environment'
    """
    values = {
        f"{section}.{key}": value
        for section, settings in flags.items()
        for key, value in settings.items()
        if value is not None
    }
    from_environment = {
        key
        for key, variable in ENVIRONMENT_VARIABLES.items()
        if key in values and environment.get(variable) == values[key]
    }
    return SettingSources(file, frozenset(values), frozenset(from_environment))


def settings_of(config: Config, sources: SettingSources) -> list[Setting]:
    """Return all settings of a configuration, in the order of their definition."""
    return list(_settings(config, config.model_dump(mode="json"), "", sources))


def _settings(
    section: BaseModel, values: Mapping[str, Any], prefix: str, sources: SettingSources
) -> Iterator[Setting]:
    for name in type(section).model_fields:
        key, value = f"{prefix}{name}", getattr(section, name)
        is_set = name in section.model_fields_set
        if isinstance(value, BaseModel):
            yield from _settings(value, values[name], f"{key}.", sources)
        elif isinstance(value, dict) and not prefix:  # the server's table, which has no model
            table = cast("dict[str, Any]", value)
            for part, entry in table.items():
                yield Setting(f"{key}.{part}", _shown_flag(part, entry), Origin.FILE)
        else:
            yield Setting(key, _shown(key, values[name]), sources.origin(key, is_set=is_set))


def _shown(key: str, value: object) -> str:
    """Return a value as text, without secrets.

    >>> _shown("swarm.key", "sk-1"), _shown("fallback.key", None), _shown("proxy.key_file", "keys")
    ('set', 'not set', '"keys"')
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    if key in _SECRET_SETTINGS or _SECRET_NAME.search(key):
        return NOT_SET if value in (None, "") else SET
    return SET if _SECRET_ADDRESS.search(text) else text


def _shown_flag(name: str, value: object) -> str:
    """Return the value of one of the server's flags as text, without secrets. The server may pass
    flags to other programs.

    >>> _shown_flag("trainer_arg", ["--hub-token=1"]), _shown_flag("model", "demo")
    ('set', '"demo"')
    """
    text = _shown(name, value)
    return SET if _SECRET_FLAG.search(text) else text
