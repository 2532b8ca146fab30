"""`fakevllm pause`, `resume` and `status`: what is asked of a proxy that runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fakevllm.config.upstream import http_url
from fakevllm.errors import ConfigError
from fakevllm.runtime.terminal_text import printable
from fakevllm_adapters.protocol.keys import bearer_header

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = dict[str, Any]

TIMEOUT_S = 10
RUN_CHARS = 8
"""Of a run's id."""
MOST_RUNS = 5
SMOOTHED = 40
"""Groups at either end of a learning curve: a step may have many or one."""
SERVED_AS = {
    True: "paused: requests are served once, none is fanned out",
    False: "on: requests are fanned out",
}
HOOKLESS = "off: without hooks each request is served once (fakevllm serve --hooks FOLDER)"


def set_paused(url: str, key: str | None, *, paused: bool) -> str:
    """What to tell the user. Raises ConfigError."""
    reply = ask(url, "/fakevllm/pause" if paused else "/fakevllm/resume", key, method="POST")
    told = SERVED_AS[paused]
    if reply.get("trouble"):
        return f"{told}; a restart will not know: {reply['trouble']}"
    return f"{told}; so it stays after a restart" if paused else told


def status(url: str, key: str | None, run: str = "") -> RenderableType:
    """A table of what the proxy says of itself. `run`: whose learning curve, by the beginning of
    its id; the newest one's where it is empty. Raises ConfigError."""
    stats = ask(url, f"/fakevllm/stats?{urlencode({'run': run})}", key)
    return as_table(root_of(url), lines(stats))


def as_table(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """As they are: an engine's words may look like markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
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
            raise ConfigError(_refused(url, error)) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ConfigError(
            f"No fakevllm proxy answers at {url} ({cause}): start it, or set --url."
        ) from None


def root_of(url: str) -> str:
    """The proxy itself, without the `/v1` that apps are given."""
    return url.rstrip("/").removesuffix("/v1")


def _refused(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "The proxy asks for an API key: give one of its key file with --key."
    try:
        reply: Json = json.load(error)
        if error.code == 403 and "detail" in reply:
            return str(reply["detail"])
        said: Json = reply["error"]
        if said["param"] == "run":
            return str(said["message"])
    except (ValueError, LookupError, TypeError):
        pass
    return no_proxy(url, error.code)


def no_proxy(url: str, status: int) -> str:
    """Of an address where something else answers."""
    return f"{url} answers {status}, as no fakevllm proxy does: set --url."


def lines(stats: Json) -> Iterator[tuple[str, str]]:
    """What `status` shows of the proxy's own statistics."""
    engine: Json = stats["engine"] or {}
    is_paused, has_hooks = bool(stats["paused"]), stats.get("has_hooks", True)
    yield "fan-out", SERVED_AS[is_paused] if is_paused or has_hooks else HOOKLESS
    yield "engine", _ENGINE.get(str(engine.get("engine_status")), _NO_SERVER)
    if detail := engine.get("engine_status_detail"):
        yield "it says", str(detail)
    yield "model", str(engine.get("model") or "not known yet")
    if step := engine.get("global_step"):
        yield "step", str(step)
    yield "groups", _counts(stats["counts"])
    yield "not trained", _counts(stats["untrained"])
    if dropped := engine.get("dropped"):
        yield "server dropped", _counts(dropped)
    if failures := stats.get("failures"):
        yield "siblings failed", _counts(failures)
    yield from _learnt(stats)
    if stats["ledger_dropped"]:
        yield "ledger", f"{stats['ledger_dropped']} writes given up"
    if stats["ledger_error"]:
        yield "ledger", f"cannot be written: {stats['ledger_error']}"


_NO_SERVER = "the swarm server cannot be reached: start it (`fakevllm-server start`)"
_ENGINE = {
    "ENGINE.OFFLINE": "not started (OFFLINE)",
    "ENGINE.BOOTING": "being started (BOOTING)",
    "ENGINE.ROLLING": "answers (ROLLING)",
    "ENGINE.ROLLING_POST": "answers, a step is about to begin (ROLLING_POST)",
    "ENGINE.WEIGHT_SYNCING": "trains, or takes up new weights (WEIGHT_SYNCING)",
}


def _learnt(stats: Json) -> Iterator[tuple[str, str]]:
    curve: list[Json] = stats["curve"]
    if not curve:
        return
    others: list[str] = stats["other_runs"]
    also = f"; {len(others)} more, with --run: {', '.join(map(_run, others[:MOST_RUNS]))}"
    yield "run", _run(stats["run_id"]) + (also if others else "")
    engine: Json = stats["engine"] or {}
    is_open = (stats["run_id"], curve[-1]["step"]) == (
        engine.get("run_id"),
        engine.get("global_step"),
    )
    num = f"{len(curve) - is_open} steps" + (", and the one being collected" if is_open else "")
    for name in ("policy_mean", "returned_best"):
        steps = [(one[name], one["groups"]) for one in curve if one[name] is not None]
        if steps:
            first, last = _mean(steps), _mean(steps[::-1])
            yield name.replace("_", " "), f"{first:.2f} → {last:.2f} in {num}"


def _mean(steps: Iterable[tuple[float, int]]) -> float:
    """Of the groups of the first steps, as many as make SMOOTHED.

    >>> _mean([(1.0, 30), (0.0, 30), (0.5, 90)])
    0.5
    """
    total, num = 0.0, 0
    for mean, groups in steps:
        total, num = total + mean * groups, num + groups
        if num >= SMOOTHED:
            break
    return total / max(1, num)


def _run(run_id: str) -> str:
    return run_id[:RUN_CHARS] or "of no name"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
