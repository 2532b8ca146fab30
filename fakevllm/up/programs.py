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
    """Where the port is set, for messages."""
    arguments: Callable[[Urls], list[str]]
    """Returns the command line, when the addresses of all programs are known."""
    is_essential: bool = True
    """Whether everything is stopped if the program does not stay up."""


def _server(settings: UpSettings) -> Program:
    def arguments(urls: Urls) -> list[str]:
        return [*settings.server_flags, "--port", urls["server"].rpartition(":")[2]]

    server = settings.server
    return Program(SERVER_MODULE, server.host, server.port, _port_in("server", settings), arguments)


def _proxy(settings: UpSettings) -> Program:
    def arguments(urls: Urls) -> list[str]:
        return ["serve", *settings.proxy_flags, "--swarm", urls["server"]]

    proxy = settings.config.proxy
    return Program("fakevllm", proxy.host, proxy.port, _port_in("proxy", settings), arguments)


def _console(settings: UpSettings) -> Program | None:
    def arguments(urls: Urls) -> list[str]:
        addresses = ["--url", urls["proxy"], "--swarm", urls["server"]]
        return ["console", *settings.proxy_flags, *addresses]

    console = settings.config.console
    if not console.enabled:
        return None
    setting = _port_in("console", settings)
    return Program("fakevllm", console.host, console.port, setting, arguments, is_essential=False)


def _port_in(section: str, settings: UpSettings) -> str:
    return f"`port` under [{section}] of {settings.file}"


PROGRAMS: Mapping[str, Callable[[UpSettings], Program | None]] = {
    "server": _server,
    "proxy": _proxy,
    "console": _console,
}
"""For each program the function that returns how to start it, or None if it is not started."""
STOP_TIMEOUT_S = STOP_GRACE_S * len(PROGRAMS) + 10.0
"""Seconds to wait for the end of `fakevllm up`, which stops its programs one after the other."""


def programs_of(settings: UpSettings) -> dict[str, Program]:
    """Return the programs to start, by name."""
    made = {name: make(settings) for name, make in PROGRAMS.items()}
    return {name: program for name, program in made.items() if program is not None}
