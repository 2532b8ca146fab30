"""Whole apps of the mixed traffic: the web chat's users and opencode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import cast

import httpx

from benchmarks.mixed_clients import MAX_TRIES, PAUSE_S, Json, Traffic, Trouble
from examples.opencode.serving import Opencode, serving
from examples.opencode.tasks import session
from examples.webchat.mock_user_request import play


async def web_chat(traffic: Traffic, url: str, log: Path, mean_s: float) -> None:
    """The mock users of the example; what the app could not answer it writes into its log."""
    heard = traffic.heard

    async def one(number: int) -> None:
        since, before = time.time(), len(no_answers(log))
        try:
            seen = await play(url, 1, 1, traffic.chance.randrange(10**9), lambda: None)
        except (httpx.HTTPError, ExceptionGroup) as error:
            text = f"chat {number}: {error!r} {getattr(error, 'exceptions', '')}"
            heard.troubles.append(Trouble("webchat", since, time.time(), text[:300]))
            return
        heard.num_web_chats += 1
        heard.web.answers += seen.answers
        heard.web.regenerated += seen.regenerated
        heard.web.failed += seen.failed
        for text in no_answers(log)[before:]:
            heard.troubles.append(Trouble("webchat", since, time.time(), text[:300]))

    await traffic.paced(mean_s, one)


def no_answers(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if "no answer" in line]


# --- opencode


async def coding(traffic: Traffic, command: str, folder: Path, mean_s: float) -> None:
    """Sessions in fresh workspaces, with another `opencode serve` where one has gone."""
    folder.mkdir()
    numbers = itertools.count()
    while time.monotonic() < traffic.until:
        traffic.heard.num_opencodes += 1
        async with serving(command, folder, f"{traffic.base_url}/v1", "sk-opencode") as opencode:
            with contextlib.suppress(httpx.ConnectError):
                await traffic.paced(
                    mean_s, lambda _: _session(traffic, opencode, folder / f"w{next(numbers):04d}")
                )


async def _session(traffic: Traffic, opencode: Opencode, workspace: Path) -> None:
    """A turn that failed is asked again, as a user would."""
    heard = traffic.heard
    workspace.mkdir()
    own = await opencode.new_session(workspace)
    for turn in session(traffic.chance):
        heard.num_turns += 1
        for _ in range(MAX_TRIES):
            since = time.time()
            trouble = await _turn(opencode, workspace, own, turn.question)
            if trouble is None:
                break
            heard.troubles.append(Trouble("opencode", since, time.time(), trouble[:300]))
            await asyncio.sleep(PAUSE_S)
        else:
            heard.num_turns_given_up += 1
    with contextlib.suppress(httpx.TimeoutException):
        await opencode.leave(workspace)


async def _turn(opencode: Opencode, workspace: Path, own: str, question: str) -> str | None:
    """What went wrong."""
    try:
        told = await opencode.ask(workspace, own, question)
    except httpx.ConnectError:
        raise
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    info = cast(Json, told.get("info") or {})
    return json.dumps(info["error"]) if info.get("error") else None
