"""Whole apps of the mixed traffic: the web chat with its mock users, and opencode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import cast

import httpx

from benchmarks.mixed_parts.clients import MAX_TRIES, RETRY_PAUSE_S, AppError, Json, Traffic
from examples.opencode.opencode_server import OpencodeServer, running_opencode
from examples.opencode.tasks import random_session
from examples.webchat.mock_user_request import play


async def run_web_chat_users(traffic: Traffic, url: str, log: Path, mean_s: float) -> None:
    """Run the example's mock users one after another.

    `url` is that of the web chat. `log` is its log file, to which the app writes a line for each
    message that it could not answer.
    """
    traffic_log = traffic.log

    async def run_user(number: int) -> None:
        started_at, num_before = time.time(), len(unanswered_lines(log))
        try:
            result = await play(url, 1, 1, traffic.chance.randrange(10**9), lambda: None)
        except (httpx.HTTPError, ExceptionGroup) as error:
            text = f"chat {number}: {error!r} {getattr(error, 'exceptions', '')}"
            traffic_log.errors.append(AppError("webchat", started_at, time.time(), text[:300]))
            return
        traffic_log.num_web_chats += 1
        traffic_log.web.answers += result.answers
        traffic_log.web.regenerated += result.regenerated
        traffic_log.web.failed += result.failed
        for text in unanswered_lines(log)[num_before:]:
            traffic_log.errors.append(AppError("webchat", started_at, time.time(), text[:300]))

    await traffic.repeat(mean_s, run_user)


def unanswered_lines(log: Path) -> list[str]:
    """Return the lines of the web chat's log that report a message without an answer."""
    return [
        line for line in log.read_text(errors="replace").splitlines() if "did not answer" in line
    ]


# --- opencode


async def run_opencode_sessions(
    traffic: Traffic, command: str, folder: Path, mean_s: float
) -> None:
    """Run sessions in new workspaces below `folder`, and restart `opencode serve` if it ends."""
    folder.mkdir()
    numbers = itertools.count()
    while time.monotonic() < traffic.until:
        traffic.log.num_opencode_starts += 1
        async with running_opencode(
            command, folder, f"{traffic.base_url}/v1", "sk-opencode"
        ) as opencode:
            with contextlib.suppress(httpx.ConnectError):
                await traffic.repeat(
                    mean_s,
                    lambda _: _run_session(traffic, opencode, folder / f"w{next(numbers):04d}"),
                )


async def _run_session(traffic: Traffic, opencode: OpencodeServer, workspace: Path) -> None:
    """Run one session. If a turn fails, send it again, as a user would do."""
    log = traffic.log
    workspace.mkdir()
    session_id = await opencode.new_session(workspace)
    for turn in random_session(traffic.chance):
        log.num_turns += 1
        for _ in range(MAX_TRIES):
            sent_at = time.time()
            error = await _run_turn(opencode, workspace, session_id, turn.question)
            if error is None:
                break
            log.errors.append(AppError("opencode", sent_at, time.time(), error[:300]))
            await asyncio.sleep(RETRY_PAUSE_S)
        else:
            log.num_turns_given_up += 1
    with contextlib.suppress(httpx.TimeoutException):
        await opencode.close_workspace(workspace)


async def _run_turn(
    opencode: OpencodeServer, workspace: Path, session_id: str, question: str
) -> str | None:
    """Send one turn and return its error, or None. Raises httpx.ConnectError if opencode ended."""
    try:
        reply = await opencode.ask(workspace, session_id, question)
    except httpx.ConnectError:
        raise
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    info = cast(Json, reply.get("info") or {})
    return json.dumps(info["error"]) if info.get("error") else None
