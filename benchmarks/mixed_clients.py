"""Clients of the mixed traffic: each asks at its own pace until time is up, and sees to it that
every request is answered in the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from examples.webchat.mock_user_request import Seen

Json = dict[str, Any]

MODEL = "app-model"
MAX_TOKENS = 128
LONG = {"ignore_eos": True}
"""Agent-tiny says a few words: so that answers are on their way when something is killed."""
MOST_S_BEFORE_CUT = 0.5
MOST_READ = 300
"""Bytes before a cut: no answer is as short."""
TIMEOUT_S = 240.0
MAX_TRIES = 12
PAUSE_S = 2.0
"""Of an app that got an error, before it asks the same again."""
PAUSE_AFTER_CUT_S = (0.3, 1.0)
"""As SDKs pause: where nothing marks the second, the proxy must have seen the first one leave."""
TITLE = "You are a title generator. Name this conversation in a few words."
ENDS = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/responses": b"event: response.completed",
    "/v1/messages": b"event: message_stop",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error that an app saw, behind the retries of its library."""

    app: str
    since: float
    """When the request was sent; both by time.time()."""
    at: float
    text: str


@dataclass(slots=True)
class Asked:
    """One request, however often it was sent."""

    name: str
    """Stands in its text and nowhere else."""
    app: str
    began: float
    ended: float | None = None
    """When it was answered; None: it never was."""
    num_cut: int = 0
    """Connections that the app closed before it had the answer."""


@dataclass(slots=True)
class Heard:
    """What all apps asked and saw."""

    asked: list[Asked] = field(default_factory=list[Asked])
    troubles: list[Trouble] = field(default_factory=list[Trouble])
    web: Seen = field(default_factory=Seen)
    num_web_chats: int = 0
    num_turns: int = 0
    """Of opencode."""
    num_turns_given_up: int = 0
    num_opencodes: int = 0
    """How often it was started: it may end by itself."""

    def begin(self, app: str, number: int) -> Asked:
        asked = Asked(f"{app}-{number:05d}", app, time.time())
        self.asked.append(asked)
        return asked


@dataclass(frozen=True, slots=True)
class Traffic:
    base_url: str
    """The proxy's, without /v1."""
    until: float
    """By time.monotonic()."""
    chance: random.Random
    heard: Heard

    async def paced(self, mean_s: float, one: Callable[[int], Awaitable[None]]) -> None:
        for number in itertools.count():
            if time.monotonic() >= self.until:
                return
            await one(number)
            await asyncio.sleep(self.chance.uniform(0.5, 1.5) * mean_s)

    async def answered(self, asked: Asked, ask: Callable[[int], Awaitable[bool]]) -> None:
        """`ask` is called with the number of the try; False: the answer was cut."""
        for attempt in range(MAX_TRIES):
            since = time.time()
            try:
                if await ask(attempt):
                    asked.ended = time.time()
                    return
                asked.num_cut += 1
                await asyncio.sleep(self.chance.uniform(*PAUSE_AFTER_CUT_S))
            except (openai.OpenAIError, httpx.HTTPError, Unanswered) as error:
                text = f"{asked.name}: {type(error).__name__}: {error}"
                self.heard.troubles.append(Trouble(asked.app, since, time.time(), text[:300]))
                await asyncio.sleep(PAUSE_S)


class Unanswered(Exception):
    """An error in the place of an answer, or half an answer."""


# --- the openai package


async def sdk(traffic: Traffic, app: str, mean_s: float) -> None:
    """Streamed or whole, with the retries that the package makes by itself."""
    async with openai.AsyncOpenAI(
        base_url=f"{traffic.base_url}/v1", api_key="sk-app", timeout=TIMEOUT_S
    ) as client:

        async def one(number: int) -> None:
            asked = traffic.heard.begin(app, number)
            messages: Any = [{"role": "user", "content": f"What is {asked.name} plus 3?"}]
            if app == "side":
                messages = [{"role": "system", "content": TITLE}, *messages]
            is_streamed = traffic.chance.random() < 0.5

            async def ask(_: int) -> bool:
                if not is_streamed:
                    whole = await client.chat.completions.create(
                        model=MODEL, messages=messages, max_tokens=MAX_TOKENS, extra_body=LONG
                    )
                    if not whole.choices:  # the package looks at the status alone
                        raise Unanswered(f"status 200, and an error: {whole.to_json(indent=None)}")
                    return bool(whole.choices[0].finish_reason)
                last = None
                async with await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=MAX_TOKENS,
                    stream=True,
                    extra_body=LONG,
                ) as stream:
                    async for chunk in stream:
                        last = chunk.choices[0].finish_reason if chunk.choices else last
                if last is None:
                    raise Unanswered("a stream without an end")
                return True

            await traffic.answered(asked, ask)

        await traffic.paced(mean_s, one)


# --- plain HTTP: three formats, hanging up at random


def body_of(path: str, text: str, is_streamed: bool) -> Json:
    body: Json = {"model": MODEL, "stream": is_streamed}
    if path.endswith("responses"):
        return body | {"input": text, "max_output_tokens": MAX_TOKENS}
    own = LONG if path.endswith("completions") else {}
    messages = [{"role": "user", "content": text}]
    return body | own | {"messages": messages, "max_tokens": MAX_TOKENS}


def trouble_in(path: str, content: bytes, is_streamed: bool) -> str | None:
    """Status 200 is no answer yet: an app that has waited long gets an error behind it."""
    if not is_streamed:
        error = json.loads(content).get("error")
        return None if error is None else f"status 200, and an error: {error}"
    if ENDS[path] not in content or b'data: {"error"' in content:
        return f"no whole stream: {content[-200:].decode(errors='replace')}"
    return None


async def plain(traffic: Traffic, app: str, mean_s: float, cut_share: float) -> None:
    """Some connections are closed before the answer is through, and the same is sent again, with
    the SDKs' mark or without."""
    chance = traffic.chance
    async with httpx.AsyncClient(base_url=traffic.base_url, timeout=TIMEOUT_S) as http:

        async def one(number: int) -> None:
            asked = traffic.heard.begin(app, number)
            path, is_streamed = chance.choice([*ENDS]), chance.random() < 0.5
            body = body_of(path, f"What is {asked.name} plus 4?", is_streamed)
            most_s = MOST_S_BEFORE_CUT if path.endswith("completions") else MOST_S_BEFORE_CUT / 8
            num_cuts = chance.randint(1, 3) if chance.random() < cut_share else 0
            is_marked = chance.random() < 0.5

            async def ask(attempt: int) -> bool:
                marked = {"x-stainless-retry-count": str(attempt)} if is_marked and attempt else {}
                request = http.build_request("POST", path, json=body, headers=marked)
                if attempt < num_cuts:
                    await hang_up(
                        request, chance.uniform(0.005, most_s), chance.randrange(MOST_READ)
                    )
                    return False
                answer = await http.send(request)
                if answer.status_code != 200:
                    raise Unanswered(f"{answer.status_code} {answer.text}")
                told = trouble_in(path, answer.content, is_streamed)
                if told is not None:
                    raise Unanswered(told)
                return True

            await traffic.answered(asked, ask)

        await traffic.paced(mean_s, one)


async def hang_up(request: httpx.Request, after_s: float, num_bytes: int) -> None:
    """Sends it, waits, reads so many bytes at most and closes. By a socket of its own: what a
    library has read ahead when it is cancelled was read, for all that the other end can know."""
    loop, url = asyncio.get_running_loop(), request.url
    head = [f"{request.method} {url.path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    with socket.socket() as own:
        own.setblocking(False)
        try:
            await loop.sock_connect(own, (url.host, url.port or 80))
            await loop.sock_sendall(own, "\r\n".join([*head, "", ""]).encode() + request.content)
            await asyncio.sleep(after_s)
            if num_bytes:
                own.recv(num_bytes)
        except BlockingIOError:  # no answer yet
            return
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
