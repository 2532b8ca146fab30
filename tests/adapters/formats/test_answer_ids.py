"""What the upstream calls its answer, as later feedback names it."""

from __future__ import annotations

from typing import Any

import pytest

from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode

Json = dict[str, Any]
CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("adapter", ["chat", "completions"])
@pytest.mark.parametrize(("name", "told"), [("c-1", "c-1"), (5, None), (None, None)])
def test_an_answer_has_its_own_id_and_no_tool_call_s(
    adapter: str, name: Any, told: str | None
) -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": [CALL]}
    choice = {"index": 0, "text": "Hi", "message": message, "finish_reason": "stop"}
    whole = ADAPTERS[adapter].read_json({"choices": [choice], "id": name})
    delta = {"index": 0, "text": "Hi", "delta": message, "finish_reason": "stop"}
    events: list[Json] = [{"id": name, "choices": [delta]}, {"id": name, "choices": []}]
    streamed = ADAPTERS[adapter].read_events([KEEP_ALIVE, *map(encode, events), DONE])
    assert (whole.id, streamed.id) == (told, told)
