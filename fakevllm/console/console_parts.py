"""The parts of a running console, which its routes share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request, Response

from fakevllm.config.key_file import KeyFile
from fakevllm.console.access.browser_sessions import BrowserSessions
from fakevllm.console.access.login_link import LoginLink
from fakevllm.console.page_renderer import PageRenderer
from fakevllm.console.settings import ConsoleSettings
from fakevllm.console.sources.proxy_status import ProxyStatus
from fakevllm.console.sources.server_releases import ServerReleases
from fakevllm.console.sources.server_status import ServerStatus
from fakevllm.errors import ConfigError
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm_adapters.protocol.keys import KeyRing

log = logging.getLogger("fakevllm.console.console_parts")


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """The parts of a running console."""

    settings: ConsoleSettings
    ledger: ReadOnlyLedger
    proxy: ProxyStatus
    releases: ServerReleases
    server: ServerStatus
    login_keys: KeyRing | None
    """API keys whose admins may log in. None if only the one-time link logs in."""
    port: int
    """Port on which the console listens."""
    show_link: Callable[[str], None] = print
    """Function that shows a line with the link for the login to whoever has started the
    console."""
    clock: Callable[[], float] = time.monotonic
    link: LoginLink = field(default_factory=LoginLink)
    sessions: BrowserSessions = field(default_factory=BrowserSessions)
    renderer: PageRenderer = field(default_factory=PageRenderer)

    @property
    def cookie_name(self) -> str:
        """Name of the login's cookie. Browsers send the cookies of a host to all its ports, so two
        consoles on one machine need two names."""
        return f"fakevllm_console_{self.port}"

    def page(
        self, request: Request, template: str, *, status: int = 200, **values: object
    ) -> Response:
        """Return the response with a page. Each page gets the token that its forms must send."""
        cookie = request.cookies.get(self.cookie_name)
        token = self.sessions.form_token(cookie) if cookie else ""
        values = {"form_token": token, "ledger_file": str(self.ledger.file), **values}
        return self.renderer.page(request, template, status=status, **values)

    def show_new_link(self) -> None:
        """Make a new login link, and show it to the person who has started the console."""
        code = self.link.issue(self.clock())
        root = self.settings.link_root(self.port)
        self.show_link(f"console: open {root}/login?code={code} (works once, for ten minutes)")

    def app_name(self, fingerprint: str | None) -> str:
        """Return the name of an app's API key."""
        return self.app_names().get(fingerprint or "", fingerprint or "no key")

    def app_names(self) -> dict[str, str]:
        """Return the names of the apps' API keys by fingerprint. If the key file cannot be read,
        return {}, so that the page can be shown without the names."""
        file = self.settings.app_keys
        try:
            entries = [] if file is None or not file.exists() else KeyFile(file).entries()
        except (ConfigError, OSError) as error:  # isolates: the page shows fingerprints
            log.warning("the names of API keys cannot be read: %s", error)
            return {}
        return {key.fingerprint: key.name for key in entries if key.name}
