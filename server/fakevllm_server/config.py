"""The server's settings, checked when made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakevllm_adapters.guard import LOOPBACK, is_loopback
from fakevllm_adapters.keys import KeyRing, keys_in
from fakevllm_server.backends import BACKENDS
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

DEFAULT_PORT = 10086


class ConfigError(Exception):
    """A user's mistake; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    backend: str
    run_dir: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    model: str | None = None
    """Model folder, or `demo` for the shipped one; wins over the job's."""
    served_model_name: str | None = None
    key_file: Path | None = None
    """One API key a line. Without it everybody on this machine is served."""
    allowed_hosts: Sequence[str] = ()
    allow_hub: bool = False
    seed: int = 0
    engine_args: Sequence[str] = ()
    """Passed to the engine's process as they are."""
    keys: KeyRing = field(default_factory=KeyRing)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"--backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}."
            )
        if not is_loopback(self.host) and not self.keys:
            raise ConfigError(
                f"--host {self.host} is reachable from outside: "
                "add --key-file FILE with one API key a line."
            )
        if self.model is not None:
            find_model(self.model, self.allow_hub)

    @property
    def hosts(self) -> frozenset[str]:
        return LOOPBACK | {self.host} | set(self.allowed_hosts)


def find_model(model: str, allow_hub: bool) -> str:
    """What the engine is to load. Raises ConfigError for what cannot be a model."""
    if model == "demo":
        return str(DEMO_MODEL_DIR)
    if Path(model).is_dir() or allow_hub:
        return model
    raise ConfigError(
        f"The model folder {model!r} does not exist. "
        "Give --model a local folder, or --allow-hub to load by name."
    )


def read_keys(key_file: Path | None) -> KeyRing:
    if key_file is None:
        return KeyRing()
    try:
        keys = keys_in(key_file.read_text())
    except OSError as error:
        raise ConfigError(f"The key file {key_file} cannot be read: {error.strerror}.") from None
    if not keys:
        raise ConfigError(f"The key file {key_file} holds no key: write one a line.")
    return KeyRing(keys)
