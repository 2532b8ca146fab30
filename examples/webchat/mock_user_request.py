"""Plays users of the web chat through its HTTP API: they ask, ask again, regenerate a wrong answer,
and put their thumbs up or down.

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

MOST_TURNS = 3
BELOW = 8
"""Both numbers of a question are smaller."""
THUMBS_SHARE = 0.5
"""Of answers that get any."""
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """What the users got."""

    tell: Callable[[str], object] = print
    """Takes the first error, when it comes."""
    answers: int = 0
    right: int = 0
    regenerated: int = 0
    failed: int = 0

    def fail(self, error: str) -> None:
        self.failed += 1
        if self.failed == 1:
            self.tell(f"The first answer to fail: {error}")


class User:
    """One chat of one user."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        self._http = http
        self._chance = chance
        self._seen = seen

    async def chat(self) -> None:
        chat = (await self._post("/api/chats")).json()["id"]
        for _ in range(self._chance.randint(1, MOST_TURNS)):
            await self._turn(chat)

    async def _turn(self, chat: int) -> None:
        left, right = self._chance.randrange(BELOW), self._chance.randrange(BELOW)
        body = {"text": f"What is {left} plus {right}?"}
        message = await self._answer(f"/api/chats/{chat}/messages", body)
        if message is None:
            return
        is_right = says(message["text"], left + right)
        if not is_right and self._chance.random() < 0.5:
            self._seen.regenerated += 1
            again = await self._answer(f"/api/chats/{chat}/regenerate", None)
            message, is_right = again or message, says((again or message)["text"], left + right)
        self._seen.answers += 1
        self._seen.right += is_right
        if self._chance.random() < THUMBS_SHARE:
            thumbs = {"thumbs": 1 if is_right else -1}
            await self._post(f"/api/messages/{message['id']}/thumbs", thumbs)

    async def _answer(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The whole message, at the end of its stream."""
        error = "it broke off"
        async with self._http.stream("POST", path, json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                event: dict[str, Any] = json.loads(line.removeprefix("data: ") or "{}")
                if event.get("type") == "done":
                    return event["message"]
                if event.get("type") == "error":
                    error = event["text"]
        self._seen.fail(error)
        return None

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return (await self._http.post(path, json=body)).raise_for_status()


def says(text: str, number: int) -> bool:
    """
    >>> says("3 plus 4 is 7.", 7), says("It is 17.", 7)
    (True, False)
    """
    found = re.search(r"(\d+)\.?$", text.strip())
    return found is not None and int(found[1]) == number


async def play(
    app: str,
    num_chats: int,
    concurrency: int,
    seed: int,
    after: Callable[[], None],
    tell: Callable[[str], object] = print,
) -> Seen:
    """`after` is called when a chat has ended, `tell` with the first error. Raises httpx.HTTPError
    where the app fails."""
    seen = Seen(tell)
    room = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=app, timeout=TIMEOUT_S) as http:

        async def one(number: int) -> None:
            async with room:
                await User(http, random.Random(f"{seed} {number}"), seen).chat()
            after()

        async with asyncio.TaskGroup() as group:
            for number in range(num_chats):
                group.create_task(one(number))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays users of the web chat.")
    parser.add_argument("--app", default="http://127.0.0.1:3000")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    with Progress(console=console) as progress:
        bar = progress.add_task("chats", total=arguments.chats)
        numbers = arguments.chats, arguments.concurrency, arguments.seed
        tell = functools.partial(progress.console.print, markup=False, soft_wrap=True)
        playing = play(arguments.app, *numbers, lambda: progress.advance(bar), tell)
        try:
            seen = asyncio.run(playing)
        except* httpx.ConnectError:
            raise SystemExit(f"No web chat answers at {arguments.app}: start it first.") from None
    console.print(
        f"{seen.answers} answers, {seen.right / max(1, seen.answers):.0%} right; "
        f"{seen.regenerated} regenerated, {seen.failed} failed"
    )


if __name__ == "__main__":
    main()
