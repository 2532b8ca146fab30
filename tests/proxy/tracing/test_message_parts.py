"""Tests of messages in the form of the GenAI conventions."""

from __future__ import annotations

from fakevllm.tracing.message_parts import content_json, input_messages, output_messages


def test_system_texts_tool_calls_and_tool_results_keep_their_order_and_ids() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    assert input_messages(messages) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be short."}]},
        {
            "role": "user",
            "parts": [{"type": "text", "content": "1 + 1?"}, {"type": "image_url"}],
        },
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1}'}],
        },
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}],
        },
    ]


def test_an_answer_has_its_reasoning_before_its_text() -> None:
    message = {"role": "assistant", "reasoning": "hm", "content": "2"}
    assert output_messages(message, "stop") == [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "2"}],
            "finish_reason": "stop",
        }
    ]


def test_messages_of_a_wrong_type_are_left_out() -> None:
    for value in (None, 7, [1, "text"], {"role": "user"}, [[1, 2]]):
        assert input_messages(value) == []
    tool_calls: list[object] = [None, {}]
    assert input_messages([{"role": "user", "content": 7, "tool_calls": tool_calls}])
    assert content_json([]) is None
