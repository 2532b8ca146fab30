"""Simulate users of the real opencode, each session in a fresh workspace.

    python -m examples.opencode.mock_user_request [--sessions 90] [--opencode opencode]

The script exits with 2 if no proxy answers, and with 1 if every turn failed.
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

from examples.opencode.opencode_command import locate_command, run_opencode
from examples.opencode.opencode_server import OpencodeServer, running_opencode
from examples.opencode.tasks import random_session

PROXY_TIMEOUT_S = 60.0
"""Timeout of the request for the models. The proxy holds the request while its engine starts."""


@dataclass(slots=True)
class Results:
    """Counts of the turns that were played."""

    report: Callable[[str], object]
    """Function that is called with a message about the first error."""
    turns: int = 0
    passed: int = 0
    """Number of turns after which the workspace's test passed."""
    failed: int = 0
    """Number of turns that opencode could not finish, in most cases because the model failed."""

    def fail(self, error: str) -> None:
        self.failed += 1
        if self.failed == 1:
            self.report(f"The first turn that failed: {error}")


async def play(
    opencode: OpencodeServer,
    folder: Path,
    options: argparse.Namespace,
    on_session_end: Callable[[], object],
    report: Callable[[str], object],
) -> Results:
    """Play all sessions and return their results.

    `on_session_end` is called after each session. `report` is called with a message about the first
    error.
    """
    results = Results(report)
    slots = asyncio.Semaphore(options.concurrency)

    async def play_session(number: int) -> None:
        rng = random.Random(f"{options.seed} {number}")
        workspace = folder / f"{options.seed}-{number}"
        async with slots:
            try:
                await _play_session(opencode, workspace, rng, results)
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                results.fail(f"opencode: {type(error).__name__} {error}")
        on_session_end()

    async with asyncio.TaskGroup() as group:
        for number in range(options.sessions):
            group.create_task(play_session(number))
    return results


async def _play_session(
    opencode: OpencodeServer, workspace: Path, rng: random.Random, results: Results
) -> None:
    workspace.mkdir()
    session = await opencode.new_session(workspace)
    for turn in random_session(rng):
        results.turns += 1
        reply = await opencode.ask(workspace, session, turn.question)
        if (error := error_in(reply)) is not None:
            results.fail(error)
        results.passed += turn.passes(workspace)
    await opencode.close_workspace(workspace)


def error_in(reply: dict[str, Any]) -> str | None:
    """Return the model's error in a reply of opencode, or None. The status is 200 in both cases.

    >>> error_in({"info": {"error": {"name": "APIError", "data": {"message": "Not Found"}}}})
    'APIError: Not Found'
    """
    error = reply.get("info", {}).get("error")
    if not error:
        return None
    message = error.get("data", {}).get("message") or json.dumps(error)
    return f"{error.get('name', 'error')}: {message}"


def find_problem(url: str, key: str) -> str | None:
    """Return an error message if no proxy at `url` accepts the key, else None.

    A proxy whose engine is not ready (503) is accepted.
    """
    fix = "start `fakevllm up` or `fakevllm serve`, or set --url http://HOST:PORT/v1"
    headers = {"Authorization": f"Bearer {key}"}
    try:
        reply = httpx.get(f"{url}/models", headers=headers, timeout=PROXY_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"No proxy answers at {url} ({error}): {fix}."
    if reply.status_code == 401:
        return f"The proxy at {url} requires an API key: pass a key of its key file with --key."
    if reply.is_success or reply.is_server_error:
        return None
    return f"No proxy answers at {url} ({reply.status_code} for /models): {fix}."


async def _play_all(
    options: argparse.Namespace,
    folder: Path,
    on_session_end: Callable[[], object],
    report: Callable[[str], object],
) -> Results:
    async with running_opencode(options.opencode, folder, options.url, options.key) as opencode:
        return await play(opencode, folder, options, on_session_end, report)


def _play_once(options: argparse.Namespace, folder: Path) -> Results:
    """Play one turn with `opencode run`, as a user types it."""
    (turn, *_) = random_session(random.Random(options.seed))
    done = run_opencode(options.opencode, folder, options.url, options.key, turn.question)
    print(done.stdout, done.stderr)
    results = Results(print, turns=1, passed=int(turn.passes(folder)))
    if done.returncode != 0:
        results.fail(f"`opencode run` exited with {done.returncode}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate users of opencode.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="any")
    parser.add_argument("--opencode", default="opencode", type=locate_command, help="its command")
    parser.add_argument("--sessions", type=int, default=90)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-once", action="store_true", help="play one turn with `opencode run`")
    options = parser.parse_args()
    options.url = options.url.rstrip("/")
    if (problem := find_problem(options.url, options.key)) is not None:
        parser.exit(2, f"{problem}\n")
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console()) as progress:
        if options.run_once:
            results = _play_once(options, Path(folder))
        else:
            bar = progress.add_task("sessions", total=options.sessions)
            report = functools.partial(progress.console.print, markup=False, soft_wrap=True)
            playing = _play_all(options, Path(folder), lambda: progress.advance(bar), report)
            results = asyncio.run(playing)
    share = results.passed / max(1, results.turns)
    print(f"{results.turns} turns, {share:.0%} passed their test; {results.failed} failed")
    if results.failed and results.failed >= results.turns:
        sys.exit(1)


if __name__ == "__main__":
    main()
