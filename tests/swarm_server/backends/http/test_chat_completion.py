from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from fakevllm_adapters.protocol.errors import WireError, unavailable
from fakevllm_adapters.vllm_compat.chat_request import parse_chat_request
from fakevllm_server.backends.fake.engine import FakeEngine
from fakevllm_server.backends.http.chat_completion import ChatCompletion
from fakevllm_server.types.sampling import Sampling, Token


class SecondChoiceFails(FakeEngine):
    """An engine whose first choice waits forever and whose second choice is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_cancelled = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        self.num_calls += 1
        if self.num_calls == 2:
            raise unavailable("Too many requests are waiting.")
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1
        yield []


def completion(engine: FakeEngine, extra: bytes) -> ChatCompletion:
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], ' + extra + b"}"
    return ChatCompletion(engine, parse_chat_request(body), None)


async def test_when_one_choice_fails_the_others_are_cancelled_and_its_error_is_raised() -> None:
    engine = SecondChoiceFails()
    with pytest.raises(WireError) as refused:
        await completion(engine, b'"n": 2').answer()
    assert refused.value.status == 503
    assert engine.num_cancelled == 1


async def test_a_tiny_temperature_does_not_overflow_the_logits() -> None:
    engine = FakeEngine()
    answer = await completion(engine, b'"temperature": 1e-45').answer()
    assert answer["choices"][0]["message"]["content"] == "no."
