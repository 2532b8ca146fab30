"""The whole configuration of the proxy, and the function `load` that reads the configuration.
Values in fakevllm.toml override the defaults, and command-line flags override values in the file.
"""

from __future__ import annotations

import logging
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fakevllm.config.base import Section
from fakevllm.config.errors import explain
from fakevllm.config.guard import AlertsSection, GuardSection
from fakevllm.config.hook_reload import ReloadSection
from fakevllm.config.http_address import WILDCARD_HOSTS, is_host_name, local_url
from fakevllm.config.policy import PolicySection
from fakevllm.config.release import ReleaseSection
from fakevllm.config.reward import FeedbackSection, RewardSection
from fakevllm.config.serving import ServeSection
from fakevllm.config.tracing import TracingSection
from fakevllm.config.upstream import FallbackSection, UpstreamSection, checked_server_url
from fakevllm.errors import ConfigError
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.access_guard import LOOPBACK, is_loopback
from fakevllm_adapters.http.client_body import FORBIDDEN_FIELDS
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.validation import check_job
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.keys import ReloadingKeyRing
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE
from fakevllm_runtime.key_file import follow_key_file

DEFAULT_FILE = Path("fakevllm.toml")
DEFAULT_SERVER_HOST, DEFAULT_SERVER_PORT = "127.0.0.1", 10086
"""Where `fakevllm-server start` listens by default."""
MAX_PORT = 65535
_DEFAULT_LIMITS = Limits()
_TOMLLIB_INVALID_VALUE = "Invalid value"
"""Text with which tomllib's error message begins if a value is not valid TOML, such as text without
quotes."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@\\*]*")
_DEFAULT_PORT = re.compile(r"http://.*:80$|https://.*:443$")
_ORIGINS_OF_ANY_PAGE = ("*", "null")
"""Values of `proxy.allowed_origins` that let every website use the proxy. The list contains "null",
because any site can embed a sandboxed frame, and browsers send "null" as the origin of this frame.
"""
DEFAULT_NUM_CALLS = 1536
"""Default of `limits.num_calls`. It is larger than the default of `limits.num_open_per_key`, so
that slow clients with one API key cannot occupy all slots."""

log = logging.getLogger("fakevllm.config.model")


def _checked_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin in _ORIGINS_OF_ANY_PAGE:
            continue
        if _ORIGIN.fullmatch(origin) is None:
            raise ValueError(
                f"{origin!r} is not an origin: write it as the browser sends it, in lower case and "
                "without a path, such as http://localhost:3000 or app://obsidian.md"
            )
        if _DEFAULT_PORT.match(origin):
            raise ValueError(f"{origin!r}: browsers leave the default port out, so do the same")
    return origins


def _checked_host_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in lower case, as the check of the `Host` header compares them."""
    for name in names:
        if not is_host_name(name):
            raise ValueError(
                f"{name!r} is not a host name: write it without http:// and without a port, such "
                "as gpu-box"
            )
    return tuple(name.lower() for name in names)


class ProxySection(Section):
    """The section `[proxy]`: the proxy's own address and files."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback requires a key file."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 means a free port that the operating system chooses."""
    run_dir: Path = Path("runs/default")
    """Folder with the ledger, the proxy's SQLite file. Only one proxy at a time can use the folder.
    The folder may also be the server's run directory."""
    key_file: Path | None = None
    """File with the API keys of apps, one per line. None means the file `keys` in the run
    directory, if that file exists. The proxy also uses this file if it is created while the proxy
    runs. If `host` is not a loopback address, the proxy requires a key file."""
    allowed_hosts: Annotated[tuple[str, ...], AfterValidator(_checked_host_names)] = ()
    """Names that are accepted in a request's `Host` header, in addition to loopback names and
    `host`. The names have no port. Requests for other names get status 403."""
    allowed_origins: Annotated[tuple[str, ...], AfterValidator(_checked_origins)] = ()
    """Origins of web pages and desktop apps that may use the routes under /v1/; "*" means every
    origin. An origin is written as the browser sends it in the header `Origin`."""


class ConsoleSection(Section):
    """The section `[console]`: the web pages of `fakevllm console`."""

    enabled: bool = True
    """Whether `fakevllm up` starts the console."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback requires a key file."""
    port: int = Field(default=8010, ge=0, le=65535)
    """Port to listen on. 0 means a free port that the operating system chooses."""
    key_file: Path | None = None
    """File with the API keys whose admins may log in. If `host` is not a loopback address, the
    console requires a key file."""
    allowed_hosts: Annotated[tuple[str, ...], AfterValidator(_checked_host_names)] = ()
    """Names that are accepted in a request's `Host` header, in addition to loopback names and
    `host`. The names have no port. Requests for other names get status 403."""


class TrackingSection(Section):
    """The section `[tracking]`: where the server writes the curves of training. The server reads
    the section from the same file, so only `fakevllm up` and `fakevllm-server start --config` use
    it."""

    to: tuple[str, ...] = ("tensorboard",)
    """Trackers: `tensorboard`, `wandb`, or both. With an empty list, no curves are written."""
    samples: int = Field(default=0, ge=0, le=64)
    """Number of groups (requests with their answers) in each table of sampled answers, which the
    trackers get too. With 0, no tables are written, and the trackers get no texts."""
    samples_every: int = Field(default=10, ge=1)
    """A table is written for each step whose number is a multiple of this number."""


class SwarmSection(Section):
    """The section `[swarm]`: address and API key of the swarm server, which samples and trains the
    model."""

    url: Annotated[str, AfterValidator(checked_server_url)] = local_url(
        DEFAULT_SERVER_HOST, DEFAULT_SERVER_PORT
    )
    """URL of the swarm server, without a path. If the file has the table `[server]`, the default is
    the address in this table."""
    key: str | None = Field(default=None, repr=False)
    """API key for the swarm server."""


class HooksSection(Section):
    """The section `[hooks]`: the user's hook files, and the time limit of a hook call."""

    path: Path | None = None
    """Folder with the hook files, or one hook file. None means that every request is sampled once
    and not trained."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds a hook call may take. The proxy stops a call that takes longer, and does not train
    its group.
    """
    environment: tuple[str, ...] = ()
    """Names of environment variables that hooks may read, in addition to a default list. This list
    has the variables for PATH, HOME, locale, temporary folder, Python, CUDA, HTTP proxies and
    certificates, and those that begin with `FAKEVLLM_JUDGE_`. Hooks see no other variables, so that
    they cannot read API keys."""
    memory_mb: int = Field(default=0, ge=0)
    """Maximum address space of the hook process in MiB; 0 means no limit."""
    watch: bool = False
    """Whether the proxy reloads the hooks when a hook file is edited."""
    reload: ReloadSection = ReloadSection()
    """The trial of edited hooks, and the limits within which they replace the running hooks."""


class ModelsSection(Section):
    """The section `[models]`: the model names that apps may use in requests."""

    aliases: tuple[str, ...] = ()
    """Names that an app may use for the served model, in addition to the model's own name; "*"
    accepts any name. An answer has the name that the app asked for."""


class DatasetSection(Section):
    """The section `[dataset]`: a file of tasks with reference answers that the reward hook can use.

    A request of an app belongs to a row of the dataset if the request contains the row's text.
    """

    file: Path | None = None
    """JSON Lines file with one task per row. The proxy looks for the texts of the rows in the first
    user message of each request. If the message has the text of exactly one row, the hooks get this
    row. `/fakevllm/stats` counts the requests that match no row, or several rows."""
    field: str = "question"
    """Name of the field that has a row's text."""


def _checked_removed_fields(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in FORBIDDEN_FIELDS:
            removed = ", ".join(sorted(FORBIDDEN_FIELDS))
            raise ValueError(f"{name} is never removed from bodies: write one of {removed}")
    return names


class LimitsSection(Section):
    """The section `[limits]`: limits on the size of one request, and on the number of concurrent
    requests. A request beyond a limit gets status 400 in vLLM's form, unless the limit names
    another status."""

    body_bytes: int = Field(default=_DEFAULT_LIMITS.body_bytes, ge=1)
    num_headers: int = Field(default=_DEFAULT_LIMITS.num_headers, ge=1)
    header_bytes: int = Field(default=_DEFAULT_LIMITS.header_bytes, ge=1)
    json_depth: int = Field(default=_DEFAULT_LIMITS.json_depth, ge=1, le=200)
    num_choices: int = Field(default=_DEFAULT_LIMITS.num_choices, ge=1)
    num_stop: int = Field(default=_DEFAULT_LIMITS.num_stop, ge=0)
    stop_chars: int = Field(default=_DEFAULT_LIMITS.stop_chars, ge=1)
    num_bad_words: int = Field(default=_DEFAULT_LIMITS.num_bad_words, ge=0)
    num_tools: int = Field(default=_DEFAULT_LIMITS.num_tools, ge=0)
    num_logit_bias: int = Field(default=_DEFAULT_LIMITS.num_logit_bias, ge=0)
    num_stop_token_ids: int = Field(default=_DEFAULT_LIMITS.num_stop_token_ids, ge=0)
    num_allowed_token_ids: int = Field(default=_DEFAULT_LIMITS.num_allowed_token_ids, ge=0)
    num_open: int = Field(default=4096, ge=0)
    """Maximum number of concurrent requests; 0 means no limit. Further requests get status 429 with
    the header `Retry-After`."""
    num_open_per_key: int = Field(default=1024, ge=0)
    """Maximum number of concurrent requests with one API key; 0 means no limit. Further requests
    get status 429 with the header `Retry-After`. Requests with the task keys of a replay count for
    the API key of the replay."""
    num_calls: int = Field(default=DEFAULT_NUM_CALLS, ge=1)
    """Maximum number of open calls from the proxy to the swarm server. Each sibling (an additional
    sample of a request) counts as one call. Further calls wait. Waiting calls for leads (the apps'
    own requests) are sent before calls for siblings. At most three quarters of this number may be
    siblings.
    """
    allowed_fields: Annotated[tuple[str, ...], AfterValidator(_checked_removed_fields)] = ()
    """Names of body fields that the proxy passes on to the engine, although it removes them from
    requests by default. These fields are removed: `api_base`, `api_key`, `api_type`, `api_version`,
    `base_url`, `custom_llm_provider`, `ec_transfer_params`, `extra_headers`, `kv_transfer_params`
    and `vllm_xargs`.
    """

    @cached_property
    def per_request(self) -> Limits:
        """The limits of a single request."""
        others = {"num_open", "num_open_per_key", "num_calls", "allowed_fields"}
        return Limits(**self.model_dump(exclude=others))


class Config(Section):
    """The whole configuration of the proxy."""

    proxy: ProxySection = ProxySection()
    console: ConsoleSection = ConsoleSection()
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
    release: ReleaseSection = ReleaseSection()
    guard: GuardSection = GuardSection()
    alerts: AlertsSection = AlertsSection()
    tracing: TracingSection = TracingSection()
    privacy: PrivacySettings = PrivacySettings()
    """What is redacted before it is written, and how long contents are kept. The job has these
    settings too, for the server."""
    job: Annotated[TrainJob, AfterValidator(check_job)] = TrainJob()
    """The training job: what to train and how. The swarm server repeats the checks of these values.
    """
    tracking: TrackingSection = TrackingSection()
    server: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The flags of the swarm server, for `fakevllm up`. The proxy does not check them: the server
    reads them from the same file."""

    @model_validator(mode="after")
    def _give_privacy_to_job(self) -> Self:
        both = self.privacy.union(self.job.privacy_or_default)
        if both != self.job.privacy_or_default:
            # The section is frozen for its users. Here it is not complete yet.
            object.__setattr__(self, "job", self.job.model_copy(update={"privacy": both}))
        return self

    @cached_property
    def serves_greedy(self) -> bool:
        """Whether at least one route has the serve policy `greedy`. With this policy, the lead (the
        app's own request) is sampled at temperature 0, in addition to the sampled siblings. The
        value is always False in shadow mode."""
        policies = {self.serve.rules(name).policy for name in ADAPTERS}
        return "greedy" in policies and not self.policy.shadow

    @cached_property
    def max_siblings(self) -> int:
        """Maximum number of siblings of one request, including the lead. The siblings are all
        answers that are sampled for the request. The lead is the answer that the app would have got
        without the proxy."""
        most = max(self.job.num_repeat, self.policy.max_siblings) + self.serves_greedy
        return min(most, MAX_GROUP_SIZE) if self.hooks.path is not None else 1

    @model_validator(mode="after")
    def _check_swarm_is_not_this_proxy(self) -> Self:
        swarm, host = urlsplit(self.swarm.url), self.proxy.host
        is_local = is_loopback(host) or host in WILDCARD_HOSTS
        own = LOOPBACK | {host} if is_local else {host}
        if swarm.port == self.proxy.port and swarm.hostname in own:
            raise ValueError(
                "swarm.url, which is by default the address in [server], is the address of this "
                "proxy itself: write the swarm server's address, or change one of the ports"
            )
        return self

    @model_validator(mode="after")
    def _check_remax_has_a_greedy_answer(self) -> Self:
        if self.job.algorithm == "remax" and self.hooks.path and not self.serves_greedy:
            raise ValueError(
                'job.algorithm "remax" compares with a greedy answer, but no route serves one: set '
                '`policy = "greedy"` in [serve] and policy.shadow to false, or choose another '
                "algorithm"
            )
        return self

    @model_validator(mode="after")
    def _check_edits_have_a_loss(self) -> Self:
        edits = self.feedback.edits
        if edits != "keep" and edits not in (self.job.loss, self.job.demonstration_loss):
            raise ValueError(
                f'feedback.edits "{edits}" needs a loss that trains edits: set '
                f'job.demonstration_loss (or job.loss) to "{edits}", or feedback.edits to "keep"'
            )
        return self

    @model_validator(mode="after")
    def _check_lockstep_is_deterministic(self) -> Self:
        rules = [self.serve.rules(name) for name in ADAPTERS]
        timing_settings = {
            'a serve.policy other than "best"': any(rule.policy != "best" for rule in rules),
            "serve.quorum": any(rule.quorum is not None for rule in rules),
            "serve.deadline_s": any(rule.deadline_s is not None for rule in rules),
            "policy.shadow": self.policy.shadow,
            "policy.sample_fraction below 1": self.policy.sample_fraction < 1,
            "feedback.window_s": self.feedback.window_s > 0,
            "fallback.url": self.fallback.url is not None,
            "hooks.watch (--watch-hooks)": self.hooks.watch,
            'a detector with "hold" in [guard]': bool(self.guard.with_action("hold")),
        }
        for setting, is_set in timing_settings.items():
            if self.job.lockstep and is_set:
                raise ValueError(
                    f"{setting} does not go with job.lockstep, because arrival times would decide "
                    "what is trained: take one of them out"
                )
        return self

    @model_validator(mode="after")
    def _check_guard_has_a_released_version(self) -> Self:
        for name in self.guard.with_action("rollback"):
            if not self.release.is_gated:
                raise ValueError(
                    f'guard.{name} = "rollback" goes back to the released version, and with '
                    'release.mode "continuous" there is none: set release.mode to "gated", or '
                    f'guard.{name} to "hold", which pauses training'
                )
        return self

    @model_validator(mode="after")
    def _check_lockstep_has_one_arm(self) -> Self:
        settings = {
            "release.baseline_share": self.release.baseline_share > 0,
            'release.mode "gated"': self.release.is_gated,
        }
        for setting, is_set in settings.items():
            if self.job.lockstep and is_set:
                raise ValueError(
                    f"{setting} does not go with job.lockstep, because the ids of sessions are "
                    "random: take one of them out"
                )
        return self

    @property
    def hosts(self) -> frozenset[str]:
        """The names that are accepted in a request's `Host` header."""
        return LOOPBACK | {self.proxy.host.lower(), *self.proxy.allowed_hosts}

    @property
    def local_url(self) -> str:
        """The URL at which commands on this machine reach the proxy. Raises ConfigError if the
        configured port is 0, because the real port is then unknown."""
        if self.proxy.port == 0:
            raise ConfigError(
                "proxy.port is 0, which means any free port: pass the proxy's URL with --url."
            )
        return local_url(self.proxy.host, self.proxy.port)

    @property
    def ledger_file(self) -> Path:
        return self.proxy.run_dir / "ledger.sqlite"

    @property
    def key_file(self) -> Path:
        return self.proxy.key_file or self.proxy.run_dir / "keys"

    def keys(self, clock: Callable[[], float] = time.monotonic) -> ReloadingKeyRing:
        """Return the API keys in the key file. When the file changes, the returned object reads the
        file again.

        `clock` returns seconds. Raises ConfigError if the file cannot be read, or if the proxy
        requires API keys and the file has no valid key.
        """
        ring = follow_key_file(self.key_file, log, clock)
        if ring.num_valid == 0:
            self._refuse_without_keys()
        return ring

    def _refuse_without_keys(self) -> None:
        """Raise ConfigError if the proxy requires API keys. Call this method if there is no valid
        key.

        The proxy requires keys in four cases:

        * The key file exists.
        * A key file is configured.
        * The proxy is reachable from other machines.
        * All web pages may use the proxy.
        """
        fix = "make one with `fakevllm keys add NAME`"
        if self.key_file.exists():
            raise ConfigError(f"The key file {self.key_file} has no valid key: {fix}.")
        if self.proxy.key_file is not None:
            raise ConfigError(f"The key file {self.key_file} does not exist: {fix}.")
        if not is_loopback(self.proxy.host):
            raise ConfigError(
                f"--host {self.proxy.host} is reachable from outside: "
                f"{fix}, or add --key-file FILE with one API key a line."
            )
        for origin in _ORIGINS_OF_ANY_PAGE:
            if origin in self.proxy.allowed_origins:
                raise ConfigError(
                    f'"{origin}" in proxy.allowed_origins lets every web page use the model: '
                    f"{fix}, or list the origins that need it."
                )


def load(file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the configuration, read from the file `file` and from flags. If `file` is None, the
    file ./fakevllm.toml is read, provided that it exists.

    `flags` maps the name of each section to a dict of keys and values. The value None in `flags`
    means that the flag was not set. Raises ConfigError with a message of one line that names the
    fix.
    """
    source = source_file(file)
    merged = _read(source) if source is not None else {}
    flag_keys: set[str] = set()
    for section, values in flags.items():
        set_values = {key: value for key, value in values.items() if value is not None}
        flag_keys.update(f"{section}.{key}" for key in set_values)
        if set_values and isinstance(merged.get(section, {}), dict):  # else refused below
            merged[section] = {**merged.get(section, {}), **set_values}
    _use_own_server(merged)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, source, flag_keys, Config)) from None


def source_file(file: Path | None) -> Path | None:
    """Return the file that `load(file, …)` reads, or None if it reads no file."""
    return file or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def _use_own_server(merged: dict[str, Any]) -> None:
    """Set `swarm.url` to the address of the table `[server]`, if the table names an address and
    `swarm.url` is not set. Wrong values stay as they are: the server refuses them."""
    server, swarm = merged.get("server"), merged.get("swarm", {})
    if not isinstance(server, dict) or not isinstance(swarm, dict) or "url" in swarm:
        return
    table = cast(dict[str, Any], server)
    host, port = table.get("host", DEFAULT_SERVER_HOST), table.get("port", DEFAULT_SERVER_PORT)
    is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port <= MAX_PORT
    if is_port and isinstance(host, str) and host:
        merged["swarm"] = {**swarm, "url": local_url(host, port)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: save it as UTF-8.") from None
    except ValueError as error:  # not TOML, or a malformed number or date
        text = str(error)
        if text.startswith(_TOMLLIB_INVALID_VALUE):
            text += ': put text in quotes, as in policy = "lead"'
        raise ConfigError(f"{file} is not TOML: {text}.") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deep: use sections and lists only.") from None
