"""Clients of the mixed traffic. Each sends requests at its own pace until the run's time is over,
and retries each request until it is answered."""

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

from examples.webchat.mock_user_request import Results

Json = dict[str, Any]

MODEL = "app-model"
MAX_TOKENS = 128
IGNORE_EOS = {"ignore_eos": True}
"""Field that makes answers long. The answers of the model agent-tiny have only a few words. Without
this field, a kill of a process would rarely hit an answer in progress."""
MAX_DELAY_BEFORE_CUT_S = 0.5
MAX_BYTES_BEFORE_CUT = 300
"""Bytes read before a connection is cut. Every whole answer is longer."""
TIMEOUT_S = 240.0
MAX_TRIES = 12
RETRY_PAUSE_S = 2.0
"""Seconds between an error and the next attempt of the app to send the same request."""
PAUSE_AFTER_CUT_S = (0.3, 1.0)
"""Range of the pause after a cut connection, in seconds. SDKs pause for about the same time. If no
header marks the second request as a retry, the proxy must have noticed the disconnect of the first
request when the second request arrives."""
TITLE_PROMPT = "You are a title generator. Name this conversation in a few words."
LAST_EVENTS = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/responses": b"event: response.completed",
    "/v1/messages": b"event: message_stop",
}
"""For each path, bytes that only a complete stream contains."""


@dataclass(frozen=True, slots=True)
class AppError:
    """An error that a client library raised after its own retries."""

    app: str
    sent_at: float
    """Unix time in seconds at which the request was sent."""
    at: float
    """Unix time in seconds of the error."""
    text: str


@dataclass(slots=True)
class ClientRequest:
    """One request with all its retries."""

    name: str
    """Unique word in the request's text, by which its group is found."""
    app: str
    started_at: float
    """Unix time in seconds."""
    answered_at: float | None = None
    """Unix time in seconds. None if the request was never answered."""
    num_cut: int = 0
    """Number of connections that the app closed before it had the answer."""


@dataclass(slots=True)
class TrafficLog:
    """Requests, answers and errors of all apps."""

    requests: list[ClientRequest] = field(default_factory=list[ClientRequest])
    errors: list[AppError] = field(default_factory=list[AppError])
    web: Results = field(default_factory=Results)
    """Answers that the web chat's users got."""
    num_web_chats: int = 0
    num_turns: int = 0
    """Number of turns of opencode."""
    num_turns_given_up: int = 0
    """Number of turns of opencode that were given up after MAX_TRIES failed attempts."""
    num_opencode_starts: int = 0
    """Number of times that `opencode serve` was started. The program may end by itself and is then
    started again."""

    def begin(self, app: str, number: int) -> ClientRequest:
        """Record and return a new request."""
        request = ClientRequest(f"{app}-{number:05d}", app, time.time())
        self.requests.append(request)
        return request


@dataclass(frozen=True, slots=True)
class Traffic:
    """Settings and log that all clients of a run share."""

    base_url: str
    """URL of the proxy, without /v1."""
    until: float
    """Time at which the clients stop, on the clock of time.monotonic()."""
    chance: random.Random
    log: TrafficLog

    async def repeat(self, mean_s: float, act: Callable[[int], Awaitable[None]]) -> None:
        """Call `act` with the numbers 0, 1, … until the time is over.

        Between two calls there is a random pause of `mean_s` seconds on average.
        """
        for number in itertools.count():
            if time.monotonic() >= self.until:
                return
            await act(number)
            await asyncio.sleep(self.chance.uniform(0.5, 1.5) * mean_s)

    async def send_until_answered(
        self, request: ClientRequest, send: Callable[[int], Awaitable[bool]]
    ) -> None:
        """Call `send` until the request is answered, at most MAX_TRIES times.

        `send` is called with the number of the attempt. It returns False if it has cut the
        connection.
        """
        for attempt in range(MAX_TRIES):
            sent_at = time.time()
            try:
                if await send(attempt):
                    request.answered_at = time.time()
                    return
                request.num_cut += 1
                await asyncio.sleep(self.chance.uniform(*PAUSE_AFTER_CUT_S))
            except (openai.OpenAIError, httpx.HTTPError, InvalidAnswer) as error:
                text = f"{request.name}: {type(error).__name__}: {error}"
                self.log.errors.append(AppError(request.app, sent_at, time.time(), text[:300]))
                await asyncio.sleep(RETRY_PAUSE_S)


class InvalidAnswer(Exception):
    """An error in the body of an answer, or an incomplete answer."""


# --- the openai package


async def run_openai_client(traffic: Traffic, app: str, mean_s: float) -> None:
    """Send chat requests through the openai package, streamed or not, with the package's retries.

    The app named "side" sends side calls: requests for a title.
    """
    async with openai.AsyncOpenAI(
        base_url=f"{traffic.base_url}/v1", api_key="sk-app", timeout=TIMEOUT_S
    ) as client:

        async def send_one(number: int) -> None:
            request = traffic.log.begin(app, number)
            messages: Any = [{"role": "user", "content": f"What is {request.name} plus 3?"}]
            if app == "side":
                messages = [{"role": "system", "content": TITLE_PROMPT}, *messages]
            is_streamed = traffic.chance.random() < 0.5

            async def send(_: int) -> bool:
                if not is_streamed:
                    whole = await client.chat.completions.create(
                        model=MODEL,
                        messages=messages,
                        max_tokens=MAX_TOKENS,
                        extra_body=IGNORE_EOS,
                    )
                    if not whole.choices:  # the package checks only the status
                        text = whole.to_json(indent=None)
                        raise InvalidAnswer(f"status 200 with an error in the body: {text}")
                    return bool(whole.choices[0].finish_reason)
                finish_reason = None
                async with await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=MAX_TOKENS,
                    stream=True,
                    extra_body=IGNORE_EOS,
                ) as stream:
                    async for chunk in stream:
                        if chunk.choices:
                            finish_reason = chunk.choices[0].finish_reason
                if finish_reason is None:
                    raise InvalidAnswer("a stream without a finish reason")
                return True

            await traffic.send_until_answered(request, send)

        await traffic.repeat(mean_s, send_one)


# --- plain HTTP: three formats, with connections that are cut


def create_body(path: str, text: str, is_streamed: bool) -> Json:
    """Return a request's body in the format of `path`."""
    body: Json = {"model": MODEL, "stream": is_streamed}
    if path.endswith("responses"):
        return body | {"input": text, "max_output_tokens": MAX_TOKENS}
    extra = IGNORE_EOS if path.endswith("completions") else {}
    messages = [{"role": "user", "content": text}]
    return body | extra | {"messages": messages, "max_tokens": MAX_TOKENS}


def find_error(path: str, content: bytes, is_streamed: bool) -> str | None:
    """Return the error in the body of an answer with status 200, or None if there is no error.

    If an app waits for a long time, the proxy sends status 200 before it knows the answer. A later
    error can then only be in the body.
    """
    if not is_streamed:
        error = json.loads(content).get("error")
        return None if error is None else f"status 200 with an error in the body: {error}"
    if LAST_EVENTS[path] not in content or b'data: {"error"' in content:
        return f"incomplete stream: {content[-200:].decode(errors='replace')}"
    return None


async def run_http_client(traffic: Traffic, app: str, mean_s: float, cut_share: float) -> None:
    """Send requests in three formats over plain HTTP.

    For `cut_share` of the requests, close the connection before the answer is complete, and send
    the request again, either with the SDKs' retry header or without it.
    """
    chance = traffic.chance
    async with httpx.AsyncClient(base_url=traffic.base_url, timeout=TIMEOUT_S) as http:

        async def send_one(number: int) -> None:
            request = traffic.log.begin(app, number)
            path, is_streamed = chance.choice([*LAST_EVENTS]), chance.random() < 0.5
            body = create_body(path, f"What is {request.name} plus 4?", is_streamed)
            has_long_answer = path.endswith("completions")
            max_delay_s = MAX_DELAY_BEFORE_CUT_S / (1 if has_long_answer else 8)
            num_cuts = chance.randint(1, 3) if chance.random() < cut_share else 0
            is_marked = chance.random() < 0.5

            async def send(attempt: int) -> bool:
                marked = is_marked and attempt > 0
                headers = {"x-stainless-retry-count": str(attempt)} if marked else {}
                message = http.build_request("POST", path, json=body, headers=headers)
                if attempt < num_cuts:
                    delay_s = chance.uniform(0.005, max_delay_s)
                    await send_and_disconnect(
                        message, delay_s, chance.randrange(MAX_BYTES_BEFORE_CUT)
                    )
                    return False
                answer = await http.send(message)
                if answer.status_code != 200:
                    raise InvalidAnswer(f"{answer.status_code} {answer.text}")
                error = find_error(path, answer.content, is_streamed)
                if error is not None:
                    raise InvalidAnswer(error)
                return True

            await traffic.send_until_answered(request, send)

        await traffic.repeat(mean_s, send_one)


async def send_and_disconnect(request: httpx.Request, delay_s: float, max_bytes: int) -> None:
    """Send a request, wait, read at most `max_bytes` of the answer, and close the connection.

    The function uses a bare socket. An HTTP library might read more bytes before it is cancelled,
    and the proxy would count these bytes as received.
    """
    loop, url = asyncio.get_running_loop(), request.url
    head = [f"{request.method} {url.path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    with socket.socket() as connection:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (url.host, url.port or 80))
            raw = "\r\n".join([*head, "", ""]).encode() + request.content
            await loop.sock_sendall(connection, raw)
            await asyncio.sleep(delay_s)
            if max_bytes:
                connection.recv(max_bytes)
        except BlockingIOError:  # no answer yet
            return
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
