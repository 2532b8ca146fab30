"""The configuration file of the server, as the commands `start` and `plan` read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fakevllm_adapters.job.model import TrainJob
    from fakevllm_server.placement.cluster_section import ClusterSection

ROLLOUT_URL = "rollout_url"
"""Name of the parameter of `start` for `--rollout-url`. On the command line it is a list. In a
configuration file it is one text or a list."""
NOT_IN_CONFIG_FILE = ("context", "config", "check", "until_stdin_closes", "listen_fd")
"""Parameters of `start` that a configuration file cannot set."""


@dataclass(frozen=True, slots=True)
class ServerFile:
    """The content of a configuration file of the server."""

    flags: dict[str, Any]
    """Values of the flags of `start`, by parameter name."""
    cluster: ClusterSection | None
    """The section `cluster`; None if the file has none."""
    job: TrainJob | None
    """The job in the table `[job]` of a TOML file; None if there is none."""


def read_server_file(file: Path, start: Callable[..., object]) -> ServerFile:
    """Read a configuration file. `start` is the command whose flags the file may set. Raises
    ConfigError if the file cannot be read or has a mistake."""
    from fakevllm_server.config.config_file import (
        CLUSTER,
        FlagType,
        flag_types,
        read_cluster,
        read_config_file,
        read_job,
    )

    flags = {
        name: flag_type
        for name, flag_type in flag_types(start).items()
        if name not in NOT_IN_CONFIG_FILE
    }
    values = read_config_file(file, flags | {ROLLOUT_URL: FlagType.TEXTS, CLUSTER: FlagType.TABLE})
    if isinstance(values.get(ROLLOUT_URL), str):
        values[ROLLOUT_URL] = [values[ROLLOUT_URL]]
    section = values.pop(CLUSTER, None)
    cluster = None if section is None else read_cluster(section, file)
    return ServerFile(values, cluster, read_job(file))


def split_arguments(arguments: list[str] | None) -> list[str]:
    """Return the command-line arguments, with each `--flag=value` split into a flag and a value."""
    return [
        part
        for argument in arguments or ()
        for part in (argument.split("=", 1) if argument.startswith("--") else [argument])
    ]
