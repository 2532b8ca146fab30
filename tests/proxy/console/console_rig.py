"""A console in this process, for tests: its parts, the links that it has shown, and a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from fakevllm.console.change_events import ChangeEvents
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.hook_dry_run import DryRunSettings
from fakevllm.console.settings import ConsoleSettings
from fakevllm.console.sources.proxy_status import ProxyStatus
from fakevllm.console.sources.server_releases import ServerReleases
from fakevllm.console.sources.server_status import ServerStatus
from fakevllm.console.web_app import create_app
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger

ABSENT_PROXY = "http://127.0.0.1:9"
"""Address at which no proxy answers. The port is that of the service discard."""
ORIGIN = "http://127.0.0.1:8001"


@dataclass(slots=True)
class Clock:
    now: float = 1000.0
    step: float = 0.0
    """Seconds that pass between two looks at the clock."""

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@dataclass(slots=True)
class ConsoleRig:
    """A console with one browser."""

    parts: ConsoleParts
    browser: httpx.AsyncClient
    links: list[str]
    """Lines with the links that the console has shown."""
    clock: Clock
    app: ChangeEvents = field(repr=False)

    def new_code(self) -> str:
        """Return the code of a new link."""
        self.parts.show_new_link()
        match = re.search(r"code=(\S+)", self.links[-1])
        assert match is not None
        return match[1]

    async def log_in(self) -> None:
        reply = await self.browser.get("/login", params={"code": self.new_code()})
        assert reply.status_code == 200

    async def get(self, path: str) -> str:
        """Return the HTML of a page that must be shown."""
        reply = await self.browser.get(path)
        assert reply.status_code == 200, reply.text
        return reply.text

    async def form_token(self, path: str) -> str:
        """Return the form token on a page."""
        match = re.search(r'name="form_token" value="(\w+)"', (await self.browser.get(path)).text)
        assert match is not None
        return match[1]


@asynccontextmanager
async def open_console(
    ledger: Path,
    *,
    proxy_url: str = ABSENT_PROXY,
    proxy_key: str | None = None,
    hooks: DryRunSettings | None = None,
    server_url: str = ABSENT_PROXY,
    key_file: Path | None = None,
    app_keys: Path | None = None,
    datasets: Sequence[Path] = (),
    redacts: bool = False,
    num_for_baseline: int = 8,
    is_logged_in: bool = True,
) -> AsyncGenerator[ConsoleRig]:
    settings = ConsoleSettings(
        ledger,
        proxy_url,
        proxy_key=proxy_key,
        server_url=server_url,
        key_file=key_file,
        app_keys=app_keys,
        hooks=hooks,
        datasets=datasets,
        redacts=redacts,
        num_for_baseline=num_for_baseline,
    )
    links: list[str] = []
    clock = Clock()
    reader = ReadOnlyLedger(ledger)
    parts = ConsoleParts(
        settings,
        reader,
        ProxyStatus(proxy_url, proxy_key),
        ServerReleases(server_url, None),
        ServerStatus(server_url, None),
        settings.login_keys(),
        port=8001,
        show_link=links.append,
        clock=clock,
    )
    events = ChangeEvents(reader.state_of_files)
    # A failing page must show its message, so exceptions of the app are not raised here.
    transport = httpx.ASGITransport(create_app(parts, events), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as browser:
        rig = ConsoleRig(parts, browser, links, clock, events)
        if is_logged_in:
            await rig.log_in()
        yield rig
