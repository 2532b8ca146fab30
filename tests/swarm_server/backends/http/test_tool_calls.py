from __future__ import annotations

import pytest

from fakevllm_server.backends.http.tool_calls import HermesParser


def test_a_hermes_call_is_separated_from_the_text_before_it() -> None:
    text = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    answer = HermesParser().parse_whole(text)
    assert answer.content == "I add. "
    assert [call["function"] for call in answer.calls] == [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("body", ["[]", "1", "null", '"text"', "{}", "{", '["name"]'])
def test_a_tool_call_that_is_no_call_object_stays_content(body: str) -> None:
    text = f"I add. <tool_call>{body}</tool_call>"
    whole = HermesParser().parse_whole(text)
    assert (whole.content, whole.calls) == (text, [])
    parser = HermesParser()
    deltas = [*parser.push(text), *parser.flush()]
    assert "".join(delta["content"] for delta in deltas) == text and not parser.has_tool_call
