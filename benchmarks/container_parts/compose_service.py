"""Read one service of `compose.yaml`: its mounts, environment and ports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VARIABLE = re.compile(r"\${(?P<name>\w+)(?::[-?][^}]*)?}")


@dataclass(frozen=True, slots=True)
class ServiceMount:
    """An entry of `volumes:`. `source` is a path of the tree, or the name of a volume."""

    source: str
    target: str
    is_read_only: bool

    @property
    def is_volume(self) -> bool:
        return not self.source.startswith(".")

    @staticmethod
    def parse(text: str) -> ServiceMount:
        """Return the mount of a short form.

        >>> ServiceMount.parse("./hooks:/srv/hooks:ro")
        ServiceMount(source='./hooks', target='/srv/hooks', is_read_only=True)
        """
        source, target, *options = text.split(":")
        return ServiceMount(source, target, "ro" in options)


def read_services(file: Path) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file by their names."""
    return yaml.safe_load(file.read_text())["services"]


def mounts_of(service: Mapping[str, Any]) -> list[ServiceMount]:
    return [ServiceMount.parse(text) for text in service.get("volumes", ())]


def environment_of(service: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment. `${NAME:-}` is replaced by the value in `values`, or by nothing."""
    return {
        name: VARIABLE.sub(lambda match: values.get(match["name"], ""), str(text))
        for name, text in service.get("environment", {}).items()
    }
