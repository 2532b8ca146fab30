"""One frozen configuration: defaults, then fakevllm.toml, then flags. Checked when made."""

from __future__ import annotations

import logging
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fakevllm.config.base import Section
from fakevllm.config.errors import explained
from fakevllm.config.feedback import FeedbackSection
from fakevllm.config.policy import PolicySection
from fakevllm.config.reward import RewardSection
from fakevllm.config.serving import ServeSection
from fakevllm.config.upstream import FallbackSection, UpstreamSection, server_url
from fakevllm.errors import ConfigError
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.client_body import FORBIDDEN_FIELDS
from fakevllm_adapters.http.guard import LOOPBACK, is_loopback
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.rules import checked
from fakevllm_adapters.protocol.keys import ReloadingKeyRing
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE

DEFAULT_FILE = Path("fakevllm.toml")
EVERYWHERE = ("0.0.0.0", "::")
_HERE: dict[str, str] = dict(zip(EVERYWHERE, ("127.0.0.1", "::1"), strict=True))
_LIMITS = Limits()
_TOMLLIB_INVALID_VALUE = "Invalid value"
"""How Python's tomllib begins its message for a value that is not TOML, such as bare text."""
log = logging.getLogger("fakevllm.config.model")


class ProxySection(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    run_dir: Path = Path("runs/default")
    """The ledger lies here."""
    key_file: Path | None = None
    """API keys, one a line; needed to listen beyond this machine. Where none is named, `keys` in
    the run directory counts as soon as it exists."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names a request's `Host` may carry."""


class SwarmSection(Section):
    url: Annotated[str, AfterValidator(server_url)] = "http://127.0.0.1:10086"
    key: str | None = Field(default=None, repr=False)
    """This proxy's key at the swarm server."""


class HooksSection(Section):
    path: Path | None = None
    """Folder with the two hook files, or one file. Without it every request is served once and
    none is trained."""
    timeout_s: float = Field(default=30.0, gt=0)


class ModelsSection(Section):
    aliases: tuple[str, ...] = ()
    """Names an app may use for the served model; "*" stands for any."""


class DatasetSection(Section):
    """Rows whose reference answers belong to requests that quote them, for an app that is already
    running."""

    file: Path | None = None
    field: str = "question"


def _client_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in FORBIDDEN_FIELDS:
            raise ValueError(
                f"{name} is never taken out: {', '.join(sorted(FORBIDDEN_FIELDS))} are"
            )
    return names


class LimitsSection(Section):
    """What one request may ask for, and how many may be open."""

    body_bytes: int = Field(default=_LIMITS.body_bytes, ge=1)
    num_headers: int = Field(default=_LIMITS.num_headers, ge=1)
    header_bytes: int = Field(default=_LIMITS.header_bytes, ge=1)
    json_depth: int = Field(default=_LIMITS.json_depth, ge=1, le=200)
    num_choices: int = Field(default=_LIMITS.num_choices, ge=1)
    num_stop: int = Field(default=_LIMITS.num_stop, ge=0)
    stop_chars: int = Field(default=_LIMITS.stop_chars, ge=1)
    num_bad_words: int = Field(default=_LIMITS.num_bad_words, ge=0)
    num_tools: int = Field(default=_LIMITS.num_tools, ge=0)
    num_logit_bias: int = Field(default=_LIMITS.num_logit_bias, ge=0)
    num_open: int = Field(default=4096, ge=0)
    """Requests at a time; 0: no limit."""
    num_open_per_key: int = Field(default=1024, ge=0)
    allowed_fields: Annotated[tuple[str, ...], AfterValidator(_client_fields)] = ()
    """Body fields that are let through although they are not for clients."""

    @cached_property
    def per_request(self) -> Limits:
        others = {"num_open", "num_open_per_key", "allowed_fields"}
        return Limits(**self.model_dump(exclude=others))


class Config(Section):
    proxy: ProxySection = ProxySection()
    swarm: SwarmSection = SwarmSection()
    hooks: HooksSection = HooksSection()
    models: ModelsSection = ModelsSection()
    dataset: DatasetSection = DatasetSection()
    policy: PolicySection = PolicySection()
    serve: ServeSection = ServeSection()
    reward: RewardSection = RewardSection()
    feedback: FeedbackSection = FeedbackSection()
    upstream: UpstreamSection = UpstreamSection()
    fallback: FallbackSection = FallbackSection()
    limits: LimitsSection = LimitsSection()
    job: Annotated[TrainJob, AfterValidator(checked)] = TrainJob()
    """As the server will check it."""

    @cached_property
    def serves_greedy(self) -> bool:
        """Whether any request is answered by a greedy lead, beside those that are sampled."""
        policies = {self.serve.rules(name).policy for name in ADAPTERS}
        return "greedy" in policies and not self.policy.shadow

    @cached_property
    def most_siblings(self) -> int:
        """Bodies that may be sampled of one request, a greedy lead's among them."""
        most = max(self.job.num_repeat, self.policy.most_siblings) + self.serves_greedy
        return min(most, MAX_GROUP_SIZE) if self.hooks.path is not None else 1

    @model_validator(mode="after")
    def _asks_another(self) -> Self:
        asked, host = urlsplit(self.swarm.url), self.proxy.host
        is_here = is_loopback(host) or host in EVERYWHERE
        own = LOOPBACK | {host} if is_here else {host}
        if asked.port == self.proxy.port and asked.hostname in own:
            raise ValueError(
                "swarm.url is the address of this proxy itself: name the swarm server's, which is "
                "http://127.0.0.1:10086 where nothing else is said (`fakevllm-server start`)"
            )
        return self

    @model_validator(mode="after")
    def _has_what_it_trains_with(self) -> Self:
        if self.job.algorithm == "remax" and self.hooks.path and not self.serves_greedy:
            raise ValueError(
                'job.algorithm "remax" compares with a greedy answer, and no route serves one: set '
                '`policy = "greedy"` in [serve], without shadow, or name another algorithm'
            )
        return self

    @model_validator(mode="after")
    def _leaves_nothing_to_chance_in_lockstep(self) -> Self:
        rules = [self.serve.rules(name) for name in ADAPTERS]
        left = {
            'a serve.policy other than "best"': any(one.policy != "best" for one in rules),
            "serve.quorum": any(one.quorum is not None for one in rules),
            "serve.deadline_s": any(one.deadline_s is not None for one in rules),
            "policy.shadow": self.policy.shadow,
            "policy.sample_fraction below 1": self.policy.sample_fraction < 1,
            "feedback.window_s": self.feedback.window_s > 0,
            "fallback.url": self.fallback.url is not None,
        }
        for setting, is_set in left.items():
            if self.job.lockstep and is_set:
                raise ValueError(
                    f"{setting} does not go with job.lockstep, for what comes first would decide "
                    "what is trained: take one of them out"
                )
        return self

    @property
    def hosts(self) -> frozenset[str]:
        return LOOPBACK | {self.proxy.host} | set(self.proxy.allowed_hosts)

    @property
    def local_url(self) -> str:
        """Where commands on this machine find the proxy. Raises ConfigError."""
        host, port = self.proxy.host, self.proxy.port
        if port == 0:
            raise ConfigError("proxy.port is 0, any that is free: name the proxy with --url.")
        host = _HERE.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def ledger_file(self) -> Path:
        return self.proxy.run_dir / "ledger.sqlite"

    @property
    def key_file(self) -> Path:
        return self.proxy.key_file or self.proxy.run_dir / "keys"

    def keys(self, clock: Callable[[], float] = time.monotonic) -> ReloadingKeyRing:
        """The keys that count now and, from the file's later changes, then. Raises ConfigError
        where they cannot be read, or are needed and missing."""
        file = self.key_file
        try:
            ring = ReloadingKeyRing(
                lambda: _stamp(file),
                lambda: file.read_text(encoding="utf-8"),
                clock,
                lambda trouble: log.warning("the key file %s counts as before: %s", file, trouble),
            )
        except OSError as error:
            raise ConfigError(f"The key file {file} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise ConfigError(f"The key file {file} is not UTF-8 text.") from None
        except ValueError as error:
            raise ConfigError(f"The key file {file}: {error}.") from None
        if ring.num_valid == 0:
            self._refuse_without_keys()
        return ring

    def _refuse_without_keys(self) -> None:
        """A file of keys without a good one is a mistake; no file is one only where others can
        reach us."""
        mend = "make one with `fakevllm keys add NAME`"
        if self.key_file.exists():
            raise ConfigError(f"The key file {self.key_file} holds no key that is good: {mend}.")
        if self.proxy.key_file is not None:
            raise ConfigError(f"The key file {self.key_file} does not exist: {mend}.")
        if not is_loopback(self.proxy.host):
            raise ConfigError(
                f"--host {self.proxy.host} is reachable from outside: "
                f"{mend}, or add --key-file FILE with one API key a line."
            )


def _stamp(file: Path) -> object:
    """Another one after each change of the file; None where there is none."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # reading it will say the same
        return error.errno
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def load(file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Config:
    """`flags` are sections of values; None means: not given. Raises ConfigError with one line that
    names the mend."""
    found = file or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    merged = _read(found) if found is not None else {}
    by_flag: set[str] = set()
    for section, values in flags.items():
        given = {key: value for key, value in values.items() if value is not None}
        by_flag.update(f"{section}.{key}" for key in given)
        if given and isinstance(merged.get(section, {}), dict):  # else refused just below
            merged[section] = {**merged.get(section, {}), **given}
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explained(error, found, by_flag, Config)) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: save it as UTF-8.") from None
    except ValueError as error:  # not TOML, or a number or date that is none
        said = str(error)
        if said.startswith(_TOMLLIB_INVALID_VALUE):
            said += ': text wants quotes, as in policy = "lead"'
        raise ConfigError(f"{file} is not TOML: {said}.") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deep: it needs sections and lists only.") from None
