"""Drives the real opencode over the task list, in fresh workspaces:

    python -m examples.opencode.mock_user_request [--sessions 90] [--opencode opencode]

Exits with 2 where no proxy is there, and with 1 where every turn failed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from examples.opencode.recorded import found, run_opencode
from examples.opencode.serving import Opencode, serving
from examples.opencode.tasks import session

PROXY_TIMEOUT_S = 60.0
"""For its models: while its engine starts, it holds what it is asked."""


@dataclass(slots=True)
class Seen:
    tell: Callable[[str], object]
    """Takes the first error, when it comes."""
    turns: int = 0
    passed: int = 0
    """Turns after which the workspace's test held."""
    failed: int = 0
    """Turns that opencode could not finish, for the most part because the model failed it."""

    def fail(self, error: str) -> None:
        self.failed += 1
        if self.failed == 1:
            self.tell(f"The first turn to fail: {error}")


async def play(
    opencode: Opencode,
    workspaces: Path,
    num_sessions: int,
    concurrency: int,
    seed: int,
    after: Callable[[], object],
    tell: Callable[[str], object],
) -> Seen:
    """`after` is called when a session has ended, `tell` with the first error."""
    seen = Seen(tell)
    room = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with room:
            try:
                await _session(opencode, workspaces / f"{seed}-{number}", f"{seed} {number}", seen)
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                seen.fail(f"opencode: {type(error).__name__} {error}")
        after()

    async with asyncio.TaskGroup() as group:
        for number in range(num_sessions):
            group.create_task(one(number))
    return seen


async def _session(opencode: Opencode, workspace: Path, seed: str, seen: Seen) -> None:
    workspace.mkdir()
    own = await opencode.new_session(workspace)
    for turn in session(random.Random(seed)):
        seen.turns += 1
        answer = await opencode.ask(workspace, own, turn.question)
        if (error := trouble_in(answer)) is not None:
            seen.fail(error)
        seen.passed += turn.checks(workspace)
    await opencode.leave(workspace)


def trouble_in(answer: dict[str, Any]) -> str | None:
    """opencode answers with 200 also where the model failed it.

    >>> trouble_in({"info": {"error": {"name": "APIError", "data": {"message": "Not Found"}}}})
    'APIError: Not Found'
    """
    error = answer.get("info", {}).get("error")
    if not error:
        return None
    message = error.get("data", {}).get("message") or json.dumps(error)
    return f"{error.get('name', 'error')}: {message}"


def no_proxy(url: str, key: str) -> str | None:
    """What to tell the user where no proxy answers at `url`; None where one does. One whose engine
    is still away (503) is one."""
    mend = "start `fakevllm serve`, or --url http://HOST:PORT/v1"
    headers = {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=PROXY_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"No proxy answers at {url} ({error}): {mend}."
    if answer.status_code == 401:
        return f"The proxy at {url} asks for an API key: give one of its key file with --key."
    if answer.is_success or answer.is_server_error:
        return None
    return f"No proxy answers at {url} ({answer.status_code} for /models): {mend}."


async def _serve(
    options: argparse.Namespace,
    folder: Path,
    after: Callable[[], object],
    tell: Callable[[str], object],
) -> Seen:
    async with serving(options.opencode, folder, options.url, options.key) as opencode:
        numbers = options.sessions, options.concurrency, options.seed
        return await play(opencode, folder, *numbers, after, tell)


def _run_once(options: argparse.Namespace, folder: Path, tell: Callable[[str], object]) -> Seen:
    """One turn by `opencode run`, as a user types it."""
    (turn, *_) = session(random.Random(options.seed))
    done = run_opencode(options.opencode, folder, options.url, options.key, turn.question)
    print(done.stdout, done.stderr)
    seen = Seen(tell, turns=1, passed=int(turn.checks(folder)))
    if done.returncode != 0:
        seen.fail(f"`opencode run` ended with {done.returncode}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Drives opencode over the task list.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="any")
    parser.add_argument("--opencode", default="opencode", type=found, help="its command")
    parser.add_argument("--sessions", type=int, default=90)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-once", action="store_true", help="one turn by `opencode run`")
    options = parser.parse_args()
    options.url = options.url.rstrip("/")
    if (trouble := no_proxy(options.url, options.key)) is not None:
        parser.exit(2, f"{trouble}\n")
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console()) as progress:
        if options.run_once:
            seen = _run_once(options, Path(folder), print)
        else:
            bar = progress.add_task("sessions", total=options.sessions)
            tell = functools.partial(progress.console.print, markup=False, soft_wrap=True)
            seen = asyncio.run(_serve(options, Path(folder), lambda: progress.advance(bar), tell))
    share = seen.passed / max(1, seen.turns)
    print(f"{seen.turns} turns, {share:.0%} passed their test; {seen.failed} failed")
    if seen.failed and seen.failed >= seen.turns:
        sys.exit(1)


if __name__ == "__main__":
    main()
