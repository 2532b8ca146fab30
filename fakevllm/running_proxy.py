"""`fakevllm pause`, `resume` and `status`: what is asked of a proxy that runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fakevllm.errors import ConfigError
from fakevllm.outage_settings import http_url
from fakevllm_adapters.keys import bearer_header

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = dict[str, Any]

TIMEOUT_S = 10
SERVED_AS = {
    True: "paused: requests are served once, none is fanned out",
    False: "on: requests are fanned out",
}


def set_paused(url: str, key: str | None, *, paused: bool) -> str:
    """What to tell the user. Raises ConfigError."""
    reply = ask(url, "/fakevllm/pause" if paused else "/fakevllm/resume", key, method="POST")
    told = SERVED_AS[paused]
    if reply.get("trouble"):
        return f"{told}; a restart will not know: {reply['trouble']}"
    return f"{told}; so it stays after a restart" if paused else told


def status(url: str, key: str | None) -> RenderableType:
    """A table of what the proxy says of itself. Raises ConfigError."""
    from rich.table import Table

    table = Table("", "", title=root_of(url), show_header=False)
    for name, value in _lines(ask(url, "/fakevllm/stats", key)):
        table.add_row(name, value)
    return table


def ask(url: str, path: str, key: str | None, *, method: str = "GET") -> Json:
    """Raises ConfigError with what to do."""
    try:
        root = http_url(root_of(url))
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from None
    request = urllib.request.Request(root + path, headers=bearer_header(key), method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_refused(url, error.code)) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ConfigError(
            f"No fakevllm proxy answers at {url} ({cause}): start it, or set --url."
        ) from None


def root_of(url: str) -> str:
    """The proxy itself, without the `/v1` that apps are given."""
    return url.rstrip("/").removesuffix("/v1")


def _refused(url: str, status: int) -> str:
    if status == 401:
        return "The proxy asks for an API key: give one of its key file with --key."
    return f"{url} answers {status}, as no fakevllm proxy does: set --url."


def _lines(stats: Json) -> Iterator[tuple[str, str]]:
    engine: Json = stats["engine"] or {}
    yield "fan-out", SERVED_AS[bool(stats["paused"])]
    yield "engine", _ENGINE.get(str(engine.get("engine_status")), _NO_SERVER)
    if detail := engine.get("engine_status_detail"):
        yield "it says", str(detail)
    yield "model", str(engine.get("model") or "not known yet")
    yield "step", str(engine.get("global_step") or 0)
    yield "groups", _counts(stats["counts"])
    yield "not trained", _counts(stats["untrained"])
    if stats["ledger_dropped"]:
        yield "ledger", f"{stats['ledger_dropped']} writes given up"
    if stats["ledger_error"]:
        yield "ledger", f"cannot be written: {stats['ledger_error']}"


_NO_SERVER = "the swarm server cannot be reached"
_ENGINE = {
    "ENGINE.OFFLINE": "not started (OFFLINE)",
    "ENGINE.BOOTING": "being started (BOOTING)",
    "ENGINE.ROLLING": "answers (ROLLING)",
    "ENGINE.ROLLING_POST": "answers, a step is about to begin (ROLLING_POST)",
    "ENGINE.WEIGHT_SYNCING": "trains, or takes up new weights (WEIGHT_SYNCING)",
}


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
