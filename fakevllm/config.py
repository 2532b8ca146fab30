"""One frozen configuration: defaults, then fakevllm.toml, then flags. Checked when made."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fakevllm.errors import ConfigError
from fakevllm_adapters.guard import LOOPBACK, is_loopback
from fakevllm_adapters.keys import KeyRing, keys_in
from fakevllm_adapters.swarm import TrainJob

DEFAULT_FILE = Path("fakevllm.toml")


def http_url(text: str) -> str:
    """The same text. Raises ValueError for what is no http address."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("write it as http://HOST:PORT")
    return text


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProxySection(_Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    run_dir: Path = Path("runs/default")
    """The ledger lies here."""
    key_file: Path | None = None
    """One API key a line; needed to listen beyond this machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names a request's `Host` may carry."""


class SwarmSection(_Section):
    url: Annotated[str, AfterValidator(http_url)] = "http://127.0.0.1:10086"
    key: str | None = None
    """This proxy's key at the swarm server."""


class HooksSection(_Section):
    path: Path | None = None
    """Folder with the two hook files, or one file. Without it every request is served once and
    none is trained."""
    timeout_s: float = Field(default=30.0, gt=0)


class ModelsSection(_Section):
    aliases: tuple[str, ...] = ()
    """Names an app may use for the served model; "*" stands for any."""


class DatasetSection(_Section):
    """Rows whose reference answers belong to requests that quote them, for an app that is already
    running."""

    file: Path | None = None
    field: str = "question"


class Config(_Section):
    proxy: ProxySection = ProxySection()
    swarm: SwarmSection = SwarmSection()
    hooks: HooksSection = HooksSection()
    models: ModelsSection = ModelsSection()
    dataset: DatasetSection = DatasetSection()
    job: TrainJob = TrainJob()

    @property
    def hosts(self) -> frozenset[str]:
        return LOOPBACK | {self.proxy.host} | set(self.proxy.allowed_hosts)

    @property
    def ledger_file(self) -> Path:
        return self.proxy.run_dir / "ledger.sqlite"

    def keys(self) -> KeyRing:
        """Raises ConfigError where they cannot be read, or are needed and missing."""
        if self.proxy.key_file is None:
            if not is_loopback(self.proxy.host):
                raise ConfigError(
                    f"--host {self.proxy.host} is reachable from outside: "
                    "add --key-file FILE with one API key a line."
                )
            return KeyRing()
        try:
            keys = keys_in(self.proxy.key_file.read_text())
        except OSError as error:
            raise ConfigError(
                f"The key file {self.proxy.key_file} cannot be read: {error.strerror}."
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"The key file {self.proxy.key_file} is not UTF-8 text.") from None
        if not keys:
            raise ConfigError(f"The key file {self.proxy.key_file} holds no key: write one a line.")
        return KeyRing(keys)


def load(file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Config:
    """`flags` are sections of values; None means: not given. Raises ConfigError with one line that
    names the mend."""
    found = file or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    merged = _read(found) if found is not None else {}
    for section, values in flags.items():
        given = {key: value for key, value in values.items() if value is not None}
        if given and isinstance(merged.get(section, {}), dict):  # else refused just below
            merged[section] = {**merged.get(section, {}), **given}
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explained(error, found)) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"The configuration {file} cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: save it as UTF-8.") from None


def _explained(error: ValidationError, file: Path | None) -> str:
    """The first problem, with what would be right."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))
    source = file if file is not None else "the flags"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(problem["loc"][:-1]))
        return f"Unknown key `{where}` in {source}: known here are {known}."
    if problem["type"] == "model_type":
        return f"`{where}` in {source} is a section: write [{where}] and its keys below it."
    said = problem["msg"].removeprefix("Value error, ")
    return f"`{where}` in {source}: {said} (got {problem['input']!r})."


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        model = cast(type[BaseModel], model.model_fields[str(part)].annotation)
    return list(model.model_fields)
