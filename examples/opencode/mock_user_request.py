"""Drives the real opencode over the task list, in fresh workspaces:

python -m examples.opencode.mock_user_request [--sessions 60] [--opencode opencode]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from examples.opencode.recorded import found, run_opencode
from examples.opencode.serving import Opencode, serving
from examples.opencode.tasks import session


@dataclass(slots=True)
class Seen:
    turns: int = 0
    passed: int = 0
    """Turns after which the workspace's test held."""
    failed: int = 0
    """Sessions that opencode gave up."""


async def play(
    opencode: Opencode,
    workspaces: Path,
    num_sessions: int,
    concurrency: int,
    seed: int,
    after: Callable[[], object],
) -> Seen:
    """`after` is called when a session has ended."""
    seen = Seen()
    room = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with room:
            try:
                await _session(opencode, workspaces / f"{seed}-{number}", f"{seed} {number}", seen)
            except httpx.HTTPError:
                seen.failed += 1
        after()

    async with asyncio.TaskGroup() as group:
        for number in range(num_sessions):
            group.create_task(one(number))
    return seen


async def _session(opencode: Opencode, workspace: Path, seed: str, seen: Seen) -> None:
    workspace.mkdir()
    own = await opencode.new_session(workspace)
    for turn in session(random.Random(seed)):
        await opencode.ask(workspace, own, turn.question)
        seen.turns += 1
        seen.passed += turn.checks(workspace)
    await opencode.leave(workspace)


async def _serve(options: argparse.Namespace, folder: Path, after: Callable[[], object]) -> Seen:
    async with serving(options.opencode, folder, options.url, options.key) as opencode:
        numbers = options.sessions, options.concurrency, options.seed
        return await play(opencode, folder, *numbers, after)


def _run_once(options: argparse.Namespace, folder: Path) -> Seen:
    """One turn by `opencode run`, as a user types it."""
    (turn, *_) = session(random.Random(options.seed))
    done = run_opencode(options.opencode, folder, options.url, options.key, turn.question)
    print(done.stdout, done.stderr)
    return Seen(1, int(turn.checks(folder)), int(done.returncode != 0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Drives opencode over the task list.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="any")
    parser.add_argument("--opencode", default="opencode", type=found, help="its command")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-once", action="store_true", help="one turn by `opencode run`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console()) as progress:
        if options.run_once:
            seen = _run_once(options, Path(folder))
        else:
            bar = progress.add_task("sessions", total=options.sessions)
            seen = asyncio.run(_serve(options, Path(folder), lambda: progress.advance(bar)))
    share = seen.passed / max(1, seen.turns)
    print(f"{seen.turns} turns, {share:.0%} passed their test; {seen.failed} sessions failed")


if __name__ == "__main__":
    main()
