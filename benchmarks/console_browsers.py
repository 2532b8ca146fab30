"""The browsers of `benchmarks.console_load`: they load the pages of a console as the pages' own
scripts do.

    python -m benchmarks.console_browsers < settings.json

The first line of standard input has the fields of Settings as JSON. When all pages are loaded, the
process prints a line. It runs until standard input closes. Then it prints the seconds of all page
loads, by name of the page, as JSON. It exits with an error if a page could not be loaded.

The browsers are a process of their own. Otherwise their work would delay the client that measures
the proxy's latency.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import unescape
from itertools import cycle, islice

import aiohttp

PAGES = {
    "Now": "/",
    "Learning": "/learning?run={run_id}",
    "Groups": "/groups",
    "Group": "/groups/{group_id}",
    "Sessions": "/sessions",
    "Feedback": "/feedback",
}
"""Paths by name of the page. The consoles show these pages in turn."""
READING_S = 10.0
"""Seconds after which the reader of the page Group opens the next group. The page has no part that
changes."""
_LIVE = re.compile(
    r'<div id="live" hx-get="([^"]*)" hx-trigger="([^"]*)"(?: data-interval-s="(\d+)")?>'
)
_TRIGGER = re.compile(r"(\w+) from:body")
_CHART = re.compile(r'class="chart" data-source="([^"]*)"')
_GROUP = re.compile(r'href="/groups/([^"/?]+)"')
_EVENT = re.compile(rb"event: (\w+)")


@dataclass(frozen=True, slots=True)
class Settings:
    """The console, the login, and what the browsers show."""

    url: str
    cookies: dict[str, str]
    num_consoles: int
    run_id: str
    """Training run of the page Learning."""


@dataclass(frozen=True, slots=True)
class Reload:
    """A path that is loaded again after an event of the console."""

    path: str
    events: frozenset[str]
    is_part: bool
    """Whether htmx requests the path, and so only the part of the page that changes."""


@dataclass(frozen=True, slots=True)
class LivePage:
    """What the scripts of a page load again, and how often."""

    reloads: Sequence[Reload] = ()
    interval_s: float = 0.0
    """Minimum seconds between two events of the same name. An event that comes too early is passed
    on later, as in the console's live.js."""


def live_page(html: str) -> LivePage:
    """Return what the scripts of a page load again: the part that changes, and the chart.

    >>> live_page('<div id="live" hx-get="/x" hx-trigger="clock from:body">').reloads
    [Reload(path='/x', events=frozenset({'clock'}), is_part=True)]
    """
    live = _LIVE.search(html)
    if live is None:
        return LivePage()
    events = frozenset(_TRIGGER.findall(live[2]))
    reloads = [Reload(unescape(live[1]), events, is_part=True)]
    if chart := _CHART.search(html):
        reloads.append(Reload(unescape(chart[1]), frozenset({"ledger"}), is_part=False))
    return LivePage(reloads, float(live[3] or 0))


@dataclass(slots=True)
class Browser:
    """One open page of the console, with its event stream."""

    http: aiohttp.ClientSession
    page: str
    paths: Sequence[str]
    """Paths of the page. If there are several, the reader opens one after another."""
    load_s: list[float] = field(default_factory=list[float])
    """Seconds of each load so far."""
    _waiting: dict[str, Reload] = field(default_factory=dict[str, Reload])
    """What must be loaded, by path. While a path is being loaded, further events cause only one
    more load, as in htmx."""
    _live: LivePage = LivePage()
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict[str, asyncio.TimerHandle])
    """Events that are passed on later, by name."""
    _passed_at: dict[str, float] = field(default_factory=dict[str, float])
    """Times at which events were passed on, by name."""
    _has_work: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        """Load the whole page and its chart."""
        self._live = live_page(await self._load(self.paths[0]))
        assert self._live.reloads or self.page == "Group", f"{self.page} loads nothing again"
        for reload in self._live.reloads:
            if not reload.is_part:
                await self._load(reload.path)

    async def stay(self) -> None:
        """Follow the event stream, and load again what has changed, until the task is
        cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._load_again())
            if self.page == "Group":
                tasks.create_task(self._read_on())

    async def _follow(self) -> None:
        async with self.http.get("/events", timeout=aiohttp.ClientTimeout(None)) as stream:
            stream.raise_for_status()
            async for line in stream.content:
                if event := _EVENT.match(line):
                    self._pass_on(event[1].decode())
        raise AssertionError("the console has ended an event stream")

    def _pass_on(self, event: str) -> None:
        if event in self._timers:
            return
        loop = asyncio.get_running_loop()
        earliest = self._passed_at.get(event, -math.inf) + self._live.interval_s
        self._timers[event] = loop.call_at(max(earliest, loop.time()), self._ask, event)

    def _ask(self, event: str) -> None:
        """Let the paths of an event be loaded."""
        del self._timers[event]
        self._passed_at[event] = asyncio.get_running_loop().time()
        self._waiting |= {
            reload.path: reload for reload in self._live.reloads if event in reload.events
        }
        self._has_work.set()

    async def _load_again(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._waiting:
                path, reload = self._waiting.popitem()
                await self._load(path, is_part=reload.is_part)

    async def _read_on(self) -> None:
        for path in islice(cycle(self.paths), 1, None):
            await asyncio.sleep(READING_S)
            await self._load(path)

    async def _load(self, path: str, *, is_part: bool = False) -> str:
        started_at = time.monotonic()
        headers = {"HX-Request": "true"} if is_part else {}
        async with self.http.get(path, headers=headers) as reply:
            text = await reply.text()
        assert reply.status == 200, f"{path}: status {reply.status}\n{text[:2000]}"
        self.load_s.append(time.monotonic() - started_at)
        return text


async def browse(settings: Settings, closed: asyncio.Event) -> dict[str, list[float]]:
    """Keep the consoles open until `closed` is set. Return the seconds of all loads by page."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        settings.url, connector=connector, cookies=settings.cookies
    ) as http:
        async with http.get("/groups") as reply:
            group_ids = list(dict.fromkeys(_GROUP.findall(await reply.text())))
        assert group_ids, "the page Groups shows no group"
        browsers = _browsers(http, settings, group_ids)
        await asyncio.gather(*(browser.open() for browser in browsers))
        print("open", flush=True)
        async with asyncio.TaskGroup() as tasks:
            staying = [tasks.create_task(browser.stay()) for browser in browsers]
            await _first(closed, staying)
            for task in staying:
                task.cancel()
    load_s: dict[str, list[float]] = {}
    for browser in browsers:
        load_s.setdefault(browser.page, []).extend(browser.load_s)
    return load_s


async def _first(closed: asyncio.Event, staying: Sequence[asyncio.Task[None]]) -> None:
    """Wait until `closed` is set, or until a browser fails."""
    waiting = asyncio.create_task(closed.wait())
    await asyncio.wait([waiting, *staying], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _browsers(
    http: aiohttp.ClientSession, settings: Settings, group_ids: Sequence[str]
) -> list[Browser]:
    browsers: list[Browser] = []
    for _, page in zip(range(settings.num_consoles), cycle(PAGES), strict=False):
        shown = group_ids if page == "Group" else group_ids[:1]
        names = [{"run_id": settings.run_id, "group_id": group_id} for group_id in shown]
        browsers.append(Browser(http, page, [PAGES[page].format(**name) for name in names]))
    return browsers


async def _main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    closed, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    print(json.dumps(await browse(settings, closed)), flush=True)


def settings_line(settings: Settings) -> str:
    """Return the line of standard input that has the settings."""
    return json.dumps(asdict(settings)) + "\n"


if __name__ == "__main__":
    asyncio.run(_main())
