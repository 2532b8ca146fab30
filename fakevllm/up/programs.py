"""The programs that `fakevllm up` starts, in the order of their start. They are stopped in the
opposite order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fakevllm.processes.supervisor import STOP_GRACE_S
from fakevllm.up.settings import SERVER_MODULE, UpSettings

Urls = Mapping[str, str]
"""The address of each program by its name."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that listens on an address, and how to start it."""

    module: str
    """Python module that is run, with `python -m`."""
    host: str
    port: int
    """Port to listen on; 0 for any free port."""
    port_setting: str
    """Name of the setting of the port, for messages."""
    arguments: Callable[[Urls], list[str]]
    """Returns the command line, when the addresses of all programs are known."""


def _server(settings: UpSettings) -> Program:
    def arguments(urls: Urls) -> list[str]:
        return [*settings.server_flags, "--port", urls["server"].rpartition(":")[2]]

    server = settings.server
    return Program(SERVER_MODULE, server.host, server.port, "port in [server]", arguments)


def _proxy(settings: UpSettings) -> Program:
    def arguments(urls: Urls) -> list[str]:
        return ["serve", *settings.proxy_flags, "--swarm", urls["server"]]

    proxy = settings.config.proxy
    return Program("fakevllm", proxy.host, proxy.port, "proxy.port", arguments)


PROGRAMS: Mapping[str, Callable[[UpSettings], Program]] = {"server": _server, "proxy": _proxy}
STOP_TIMEOUT_S = STOP_GRACE_S * len(PROGRAMS) + 10.0
"""Seconds to wait for the end of `fakevllm up`, which stops its programs one after the other."""
