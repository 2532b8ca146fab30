"""The console's settings: which data it shows, where it listens, and who may log in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakevllm.config.http_address import WILDCARD_HOSTS, local_url
from fakevllm.config.key_file import console_lacks_key_file
from fakevllm.config.model import DEFAULT_SERVER_HOST, DEFAULT_SERVER_PORT, DatasetSection
from fakevllm.config.reward import FeedbackSection
from fakevllm.console.hook_dry_run import DryRunSettings
from fakevllm.errors import ConfigError
from fakevllm_adapters.http.access_guard import LOOPBACK
from fakevllm_adapters.protocol.keys import KeyRing, ReloadingKeyRing
from fakevllm_runtime.key_file import follow_key_file

log = logging.getLogger("fakevllm.console.settings")


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The console's settings: which data it shows, where it listens, and who may log in."""

    ledger: Path
    proxy_url: str
    proxy_key: str | None = field(default=None, repr=False)
    """API key for the proxy."""
    server_url: str = local_url(DEFAULT_SERVER_HOST, DEFAULT_SERVER_PORT)
    """URL of the swarm server, for the history of releases and for decisions about them."""
    server_key: str | None = field(default=None, repr=False)
    """API key for the swarm server."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest reward that the hook can return, for confidence intervals."""
    datasets: Sequence[Path] = ()
    """Dataset files, for the right answers to requests that belong to a row."""
    redacts: bool = False
    """Whether the configuration redacts texts. Rows of files are not shown then, because the files
    have the texts without redaction."""
    dataset_field: str = DatasetSection().field
    """Name of the field that has the text of a row."""
    num_for_baseline: int = FeedbackSection().num_for_baseline
    """Number of feedback values that an API key must have before its late feedback is trained."""
    host: str = "127.0.0.1"
    port: int = 0
    allowed_hosts: Sequence[str] = ()
    """Names that are accepted in a request's `Host` header, in addition to loopback names and
    `host`."""
    key_file: Path | None = None
    """File with the API keys whose admins may log in. None means that only the one-time link logs
    in."""
    app_keys: Path | None = None
    """The proxy's key file, for the names of apps."""
    hooks: DryRunSettings | None = None
    """The hook files that are shown and tried. None if they are not known."""

    @property
    def hosts(self) -> frozenset[str]:
        """The names that are accepted in a request's `Host` header."""
        return LOOPBACK | {self.host.lower()} | {name.lower() for name in self.allowed_hosts}

    def link_root(self, port: int) -> str:
        """Return the URL of the console for the link that is printed. `port` is the port on which
        the console listens."""
        if self.host in WILDCARD_HOSTS and self.allowed_hosts:
            return local_url(self.allowed_hosts[0], port)
        return local_url(self.host, port)

    def login_keys(self) -> KeyRing | ReloadingKeyRing | None:
        """Return the API keys with which admins may log in. Return None if there is no key file.

        Raises ConfigError if the key file has no valid key, or if the console is reachable from
        other machines and has no key file.
        """
        fix = "make one with `fakevllm keys add NAME --key-file FILE`"
        if console_lacks_key_file(self.key_file, self.host):
            raise ConfigError(
                f"--host {self.host} is reachable from outside: add --key-file FILE with a key of "
                f"an admin ({fix})."
            )
        if self.key_file is None:
            return None
        ring = follow_key_file(self.key_file, log)
        if ring.num_valid == 0:
            raise ConfigError(f"The key file {self.key_file} has no valid key: {fix}.")
        return ring
