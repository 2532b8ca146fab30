"""Ids of answers, which later feedback refers to."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode

Json = dict[str, Any]
CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("adapter", ["chat", "completions"])
@pytest.mark.parametrize(("name", "expected"), [("c-1", "c-1"), (5, None), (None, None)])
def test_an_answer_has_its_own_id_and_not_that_of_a_tool_call(
    adapter: str, name: Any, expected: str | None
) -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": [CALL]}
    choice = {"index": 0, "text": "Hi", "message": message, "finish_reason": "stop"}
    whole = ADAPTERS[adapter].parse_answer({"choices": [choice], "id": name})
    delta = {"index": 0, "text": "Hi", "delta": message, "finish_reason": "stop"}
    events: list[Json] = [{"id": name, "choices": [delta]}, {"id": name, "choices": []}]
    streamed = ADAPTERS[adapter].parse_stream([KEEP_ALIVE, *map(encode, events), DONE])
    assert (whole.id, streamed.id) == (expected, expected)
