"""Requests that take much work before they are sampled, against a real engine process."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from contract.rollouts import CHAT, Rig, start_rig, user

Json = dict[str, Any]

JSON = {"Content-Type": "application/json"}
MAX_SILENCE_S = 5.0
"""Timeout of one health check by which the server notices an engine that hangs."""
LONG_TEXT = "the quick brown fox " * (2**20 // 20)
"""A text of one MiB, which takes one or two seconds to tokenize."""


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Rig]:
    rig = await start_rig("embedded", tmp_path_factory.mktemp("engine"))
    yield rig
    await rig.close()


async def post(rig: Rig, path: str, body: Json) -> tuple[int, Json]:
    raw = io.BytesIO(orjson.dumps({"model": rig.endpoint.model_name} | body))
    async with rig.http.post(path, data=raw, headers=JSON) as answer:
        return answer.status, await answer.json()


async def test_the_engine_answers_others_while_it_tokenizes_long_texts(rig: Rig) -> None:
    long = [asyncio.create_task(post(rig, "/tokenize", {"prompt": LONG_TEXT})) for _ in range(6)]
    short: Json = {"messages": user("What is 3 plus 4?"), "max_tokens": 4}
    silences: list[float] = []
    while not all(task.done() for task in long):
        start = time.monotonic()
        assert await rig.rollout.health()
        status, _ = await post(rig, CHAT, short)
        assert status == 200
        silences.append(time.monotonic() - start)
    assert [status for status, _ in await asyncio.gather(*long)] == [200] * len(long)
    assert len(silences) > len(long)
    assert max(silences) < MAX_SILENCE_S


async def test_a_prompt_of_many_megabytes_is_refused_at_once(rig: Rig) -> None:
    text = "the quick brown fox " * 10**6
    for path, body in (
        (CHAT, {"messages": user(text)}),
        ("/v1/completions", {"prompt": text}),
        ("/tokenize", {"messages": user(text)}),
        ("/tokenize", {"prompt": text}),
    ):
        start = time.monotonic()
        status, answer = await post(rig, path, body)
        assert status == 400, answer
        assert "20000" in answer["error"]["message"]
        assert time.monotonic() - start < MAX_SILENCE_S


async def test_a_prompt_of_many_megabytes_that_is_to_be_truncated_is_answered(rig: Rig) -> None:
    body: Json = {"messages": user("the quick brown fox " * 10**6), "max_tokens": 4}
    start = time.monotonic()
    status, answer = await post(rig, CHAT, body | {"truncate_prompt_tokens": 16})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 16)
    assert time.monotonic() - start < MAX_SILENCE_S


async def test_long_lists_of_ids_are_refused_and_do_not_silence_the_engine(rig: Rig) -> None:
    ids = [7] * 8_000_000
    attacks: list[tuple[str, Json]] = [
        ("/detokenize", {"tokens": ids}),
        ("/v1/completions", {"prompt": ids}),
        ("/v1/completions", {"prompt": [ids]}),
        (CHAT, {"messages": user("hi"), "stop_token_ids": ids}),
        (CHAT, {"messages": user("hi"), "allowed_token_ids": ids}),
        (CHAT, {"messages": user("hi"), "bad_words": ["a"] * 10**6}),
    ]
    for path, body in attacks:
        attack = asyncio.create_task(post(rig, path, body))
        while not attack.done():
            assert await rig.rollout.health()
            await asyncio.sleep(0.05)
        assert (await attack)[0] == 400
