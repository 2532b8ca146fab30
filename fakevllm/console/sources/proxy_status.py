"""The status of the proxy and of its server, as `fakevllm status` shows it.

All browser pages share one cached status. Therefore the proxy gets few requests, however many pages
are open.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakevllm.console.problems import Problem, find_problems
from fakevllm.console.sources.shared_reply import SharedReply
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import Json, fetch_json, no_proxy, proxy_root
from fakevllm.runtime.status_rows import arm_rows, status_rows

TIMEOUT_S = 5.0
"""Maximum seconds that a page waits for the proxy."""
_FOREIGN_JSON = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of code that expects the statistics of a proxy and gets other JSON."""
_PATH = "/fakevllm/stats?curve=ends"


@dataclass(frozen=True, slots=True)
class ProxyView:
    """What the console shows of the proxy."""

    url: str
    rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Names and values, as `fakevllm status` shows them."""
    arm_rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    problems: list[Problem] = field(default_factory=list[Problem])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups by state."""
    feedback: dict[str, int] = field(default_factory=dict[str, int])
    """Number of feedback items by state."""
    hooks: Json = field(default_factory=dict[str, Any])
    """The key `hooks` of the statistics. Empty if the proxy has no hooks."""
    is_reached: bool = False
    is_paused: bool | None = None
    """Whether training is paused. None if the proxy was not reached."""
    is_gated: bool | None = None
    """Whether the proxy's setting release.mode is `gated`. None if the proxy was not reached."""
    engine: Json | None = None
    """Status of the server and its engine, as the server reports it. None if it is unknown."""


class ProxyStatus:
    """The status of one proxy, which all pages share."""

    def __init__(
        self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._key = key
        self._reply = SharedReply(self._fetch, clock)

    def view(self) -> ProxyView:
        """Return the status. The method blocks the thread. Problems with the proxy are part of the
        status, and raise no error."""
        view = self._reply.get(TIMEOUT_S)
        return view or self._not_reached(no_proxy(self._url, "timed out"))

    def forget(self) -> None:
        """Discard the cached status, so that the next call of `view` fetches it again."""
        self._reply.forget()

    def _fetch(self) -> ProxyView:
        try:
            stats = fetch_json(self._url, _PATH, self._key, timeout_s=TIMEOUT_S)
        except ConfigError as error:  # translates: the page shows the sentence
            return self._not_reached(str(error))
        try:
            return _view_of(proxy_root(self._url), stats)
        except _FOREIGN_JSON:  # translates
            return self._not_reached(
                f"The reply of {self._url} is not that of a fakevllm proxy of this version: set "
                "--url, or update the older one of the two."
            )

    def _not_reached(self, message: str) -> ProxyView:
        # Most messages of commands have the form `problem: remedy`.
        text, _, remedy = message.rpartition(": ")
        if text:
            problem = Problem(f"{text}.", f"{remedy[:1].upper()}{remedy[1:]}")
        else:
            problem = Problem(message, "")
        return ProxyView(self._url, problems=[problem])


def _view_of(url: str, stats: Json) -> ProxyView:
    arms: Json | None = stats.get("arms")
    is_gated = stats.get("release") is not None
    return ProxyView(
        url,
        rows=list(status_rows(stats)),
        arm_rows=[] if arms is None else list(arm_rows(arms, is_gated=is_gated)),
        problems=find_problems(stats),
        counts=dict(stats["counts"]),
        feedback=dict(stats.get("feedback") or {}),
        hooks=stats.get("hooks") or {},
        is_reached=True,
        is_paused=bool(stats.get("paused")),
        is_gated=is_gated,
        engine=stats.get("engine"),
    )
