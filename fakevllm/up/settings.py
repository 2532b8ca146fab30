"""Read the settings of `fakevllm up` from `fakevllm.toml`. The server's own code checks the table
`[server]`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fakevllm.config.http_address import local_url
from fakevllm.config.key_file import console_lacks_key_file
from fakevllm.config.model import DEFAULT_FILE, Config, load
from fakevllm.errors import ConfigError, FakevllmError, UserError
from fakevllm.runtime.local_engines import READY_MARGIN_S
from fakevllm_adapters.http.access_guard import LOOPBACK
from fakevllm_runtime.engines import boot_timeout_s

SERVER_MODULE = "fakevllm_server"
KEY_VARIABLE = "FAKEVLLM_SWARM_KEY"
CHECK_TIMEOUT_S = 60.0
"""Maximum seconds that the server's check of its settings may take."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The server's settings, as the server prints them after it has checked them."""

    host: str
    port: int
    engines: tuple[str, ...]
    """Names of the engines that the server starts."""

    @property
    def ready_timeout_s(self) -> float:
        return boot_timeout_s(self.engines) + READY_MARGIN_S


@dataclass(frozen=True, slots=True)
class UpSettings:
    """The settings of the programs that `fakevllm up` starts."""

    file: Path
    config: Config
    """The proxy's settings."""
    server: ServerSettings
    run_dir_flag: Path | None = None
    """The run directory on the command line. It wins over the one in the file."""

    @property
    def run_dir(self) -> Path:
        return self.config.proxy.run_dir

    @property
    def server_flags(self) -> list[str]:
        """The flags of `fakevllm-server start`, without the flags that set the address."""
        return _server_flags(self.file, self.config)

    @property
    def proxy_flags(self) -> list[str]:
        """The flags that say where the proxy's settings are, for `fakevllm serve`, `console` and
        `up`. A flag that was not given is not passed on, because the console shows where each
        setting came from."""
        flags = ["--config", str(self.file)]
        return flags if self.run_dir_flag is None else [*flags, "--run-dir", str(self.run_dir_flag)]


def read_settings(
    file: Path | None,
    run_dir: Path | None,
    is_installed: Callable[[str], bool] = lambda module: (
        importlib.util.find_spec(module) is not None
    ),
) -> UpSettings:
    """Return the settings of the programs that `fakevllm up` starts. Raises UserError with one line
    for each mistake that can be found before the programs are started."""
    if file is None and not DEFAULT_FILE.exists():
        raise UserError(
            f"There is no {DEFAULT_FILE} in this folder: write one with a table [server], or name "
            "one with --config FILE."
        )
    file = file or DEFAULT_FILE
    if file.suffix != DEFAULT_FILE.suffix:
        raise UserError(
            f"{file} does not end in {DEFAULT_FILE.suffix}: rename it, because the server reads "
            "any other file as YAML."
        )
    config = load(file, {"proxy": {"run_dir": run_dir}})
    if "server" not in config.model_fields_set:
        raise ConfigError(
            f"{file} has no table [server]: add one, with the flags of `fakevllm-server start` as "
            'keys, such as model = "demo".'
        )
    config.keys()
    _check_key(file, config)
    if not is_installed(SERVER_MODULE):
        raise UserError(
            f"The package {SERVER_MODULE} is not installed in this Python: install fakevllm again, "
            "or run `fakevllm serve` for a server on another machine."
        )
    server = _check_server(_server_flags(file, config))
    _check_same_server(file, config, server)
    _check_ports(file, config, server)
    _check_console(file, config)
    return UpSettings(file, config, server, run_dir)


def _server_flags(file: Path, config: Config) -> list[str]:
    flags = ["start", "--config", str(file)]
    if not {"run_dir", "run-dir"} & config.server.keys():
        flags += ["--run-dir", str(config.proxy.run_dir)]
    return flags


def _check_server(flags: list[str]) -> ServerSettings:
    """Run `fakevllm-server` with `--check`, and return the settings that it prints. Raises
    ConfigError with the server's error message if the server refuses the settings."""
    command = [sys.executable, "-m", SERVER_MODULE, *flags, "--check"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise FakevllmError(
            f"The check of [server] did not end within {CHECK_TIMEOUT_S:.0f} s: try it with "
            f"`fakevllm-server {shlex.join(flags)} --check`."
        ) from None
    if done.returncode != 0:
        *_, line = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(line.removeprefix("fakevllm-server: ").removeprefix("Error: "))
    values = json.loads(done.stdout)
    return ServerSettings(values["host"], values["port"], tuple(values["engines"]))


def _check_key(file: Path, config: Config) -> None:
    """Raise ConfigError if the server requires a key and the proxy has none. Without this check,
    `fakevllm up` would wait for the engine until a timeout."""
    requires_key = bool({"key_file", "key-file"} & config.server.keys())
    if requires_key and not (config.swarm.key or os.environ.get(KEY_VARIABLE)):
        raise ConfigError(
            f"[server] in {file} has a key-file, and the proxy has no key for the server: set the "
            f"environment variable {KEY_VARIABLE} to one of its keys."
        )


def _check_same_server(file: Path, config: Config, server: ServerSettings) -> None:
    """Raise ConfigError if `swarm.url` is set, and is not the address of [server]."""
    if "url" not in config.swarm.model_fields_set:
        return
    url, own = urlsplit(config.swarm.url), urlsplit(local_url(server.host, server.port))
    is_same_host = url.hostname in {server.host, own.hostname} or (
        url.hostname in LOOPBACK and own.hostname in LOOPBACK
    )
    if not (is_same_host and url.port == own.port and url.scheme == own.scheme):
        raise ConfigError(
            f"`swarm.url` in {file} ({config.swarm.url}) is not the address of [server] "
            f"({own.geturl()}): leave it out, because `fakevllm up` sets it."
        )


def _check_ports(file: Path, config: Config, server: ServerSettings) -> None:
    """Raise ConfigError if two programs would listen on the same port. Without this check, the
    second program would report that its port is in use."""
    ports = {"`port` in [server]": server.port, "`proxy.port`": config.proxy.port}
    if config.console.enabled:
        ports["`console.port`"] = config.console.port
    for (name, port), (other, other_port) in itertools.combinations(ports.items(), 2):
        if port and port == other_port:
            raise ConfigError(f"{name} and {other} of {file} are both {port}: change one.")


def _check_console(file: Path, config: Config) -> None:
    """Raise ConfigError if the console would refuse to start at its address. This check runs before
    any program is started."""
    console = config.console
    if console.enabled and console_lacks_key_file(console.key_file, console.host):
        raise ConfigError(
            f"`console.host` in {file} is reachable from outside: set `console.key_file` to a file "
            "with a key of an admin (`fakevllm keys add NAME --role admin --key-file FILE`)."
        )
