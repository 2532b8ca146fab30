"""Simulate users of the web chat through its HTTP API.

They ask questions and follow-ups, regenerate wrong answers, and rate answers with thumbs.

    python -m examples.webchat.mock_user_request [--app http://127.0.0.1:3000] [--chats 200]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

MAX_TURNS = 3
LIMIT = 8
"""Both numbers of a question are below this limit."""
THUMBS_PROBABILITY = 0.5
"""Probability that a user rates an answer."""
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Results:
    """Counts of the answers that the users received."""

    report: Callable[[str], object] = print
    """Function that is called with a message about the first error."""
    answers: int = 0
    right: int = 0
    regenerated: int = 0
    failed: int = 0

    def fail(self, error: str) -> None:
        self.failed += 1
        if self.failed == 1:
            self.report(f"The first answer that failed: {error}")


class User:
    """A user with one chat."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random, results: Results) -> None:
        self._http = http
        self._rng = rng
        self._results = results

    async def chat(self) -> None:
        chat = (await self._post("/api/chats")).json()["id"]
        for _ in range(self._rng.randint(1, MAX_TURNS)):
            await self._turn(chat)

    async def _turn(self, chat: int) -> None:
        left, right = self._rng.randrange(LIMIT), self._rng.randrange(LIMIT)
        body = {"text": f"What is {left} plus {right}?"}
        message = await self._answer(f"/api/chats/{chat}/messages", body)
        if message is None:
            return
        is_right = ends_with_number(message["text"], left + right)
        if not is_right and self._rng.random() < 0.5:
            self._results.regenerated += 1
            message = await self._answer(f"/api/chats/{chat}/regenerate", None) or message
            is_right = ends_with_number(message["text"], left + right)
        self._results.answers += 1
        self._results.right += is_right
        if self._rng.random() < THUMBS_PROBABILITY:
            thumbs = {"thumbs": 1 if is_right else -1}
            await self._post(f"/api/messages/{message['id']}/thumbs", thumbs)

    async def _answer(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the stored message from the end of the stream, or None after an error."""
        error = "the stream broke off"
        async with self._http.stream("POST", path, json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                event: dict[str, Any] = json.loads(line.removeprefix("data: ") or "{}")
                if event.get("type") == "done":
                    return event["message"]
                if event.get("type") == "error":
                    error = event["text"]
        self._results.fail(error)
        return None

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return (await self._http.post(path, json=body)).raise_for_status()


def ends_with_number(text: str, number: int) -> bool:
    """Return whether a text ends with this number.

    >>> ends_with_number("3 plus 4 is 7.", 7), ends_with_number("It is 17.", 7)
    (True, False)
    """
    match = re.search(r"(\d+)\.?$", text.strip())
    return match is not None and int(match[1]) == number


async def play(
    app: str,
    num_chats: int,
    concurrency: int,
    seed: int,
    on_chat_end: Callable[[], None],
    report: Callable[[str], object] = print,
) -> Results:
    """Play chats and return their results.

    `on_chat_end` is called after each chat. `report` is called with a message about the first
    error. Raises httpx.HTTPError if the app itself fails.
    """
    results = Results(report)
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=app, timeout=TIMEOUT_S) as http:

        async def play_chat(number: int) -> None:
            async with slots:
                await User(http, random.Random(f"{seed} {number}"), results).chat()
            on_chat_end()

        async with asyncio.TaskGroup() as group:
            for number in range(num_chats):
                group.create_task(play_chat(number))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate users of the web chat.")
    parser.add_argument("--app", default="http://127.0.0.1:3000")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    with Progress(console=console) as progress:
        bar = progress.add_task("chats", total=arguments.chats)
        numbers = arguments.chats, arguments.concurrency, arguments.seed
        report = functools.partial(progress.console.print, markup=False, soft_wrap=True)
        playing = play(arguments.app, *numbers, lambda: progress.advance(bar), report)
        try:
            results = asyncio.run(playing)
        except* httpx.ConnectError:
            raise SystemExit(f"No web chat answers at {arguments.app}: start it first.") from None
    console.print(
        f"{results.answers} answers, {results.right / max(1, results.answers):.0%} right; "
        f"{results.regenerated} regenerated, {results.failed} failed"
    )
    if results.failed and not results.answers:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
