from typing import Any

import pytest

from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.completions import CompletionsAdapter
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode

COMPLETIONS = CompletionsAdapter()
Json = dict[str, Any]


def chunk(text: Any, finish: str | None = None, index: int = 0) -> bytes:
    return encode({"choices": [{"index": index, "text": text, "finish_reason": finish}]})


WHOLE = b'{"choices": [{}]}'


def test_the_exchange_relays_request_and_response_unchanged() -> None:
    request: Json = {"prompt": "hi", "stream": True, "frobnicate": 1}
    exchange = COMPLETIONS.open(request, EngineInfo())
    assert exchange.body is request and exchange.streamed
    assert exchange.event(chunk("a")) == chunk("a") and exchange.answer(WHOLE) == WHOLE


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("once", "once"),
        (["first", "second"], "first"),
        ([1, 2], ""),
        ([[1, 2]], ""),
        ([], ""),
        (None, ""),
        (7, ""),
    ],
)
def test_the_question_is_the_first_prompt_if_it_is_text(prompt: Any, text: str) -> None:
    request = {"prompt": prompt}
    assert COMPLETIONS.question(request) == COMPLETIONS.opening(request) == text
    assert COMPLETIONS.question({}) == ""


def test_siblings_sample_from_the_whole_distribution_and_the_lead_is_unchanged() -> None:
    request: Json = {"prompt": "hi", "temperature": 0.3, "top_p": 0.5, "seed": 7}
    assert COMPLETIONS.sibling_body(request, 0, 1.0) is request
    changed = COMPLETIONS.sibling_body(request, 2, 1.0)
    assert (changed["temperature"], changed["top_p"], changed["seed"]) == (1.0, 1.0, 9)
    assert changed["prompt"] == "hi"


def test_an_answer_is_parsed_into_an_assistant_message() -> None:
    choice: Json = {"index": 0, "text": "Hi", "finish_reason": "length"}
    answer = COMPLETIONS.parse_answer({"choices": [choice], "usage": {"completion_tokens": 1}})
    assert answer.message == {"role": "assistant", "content": "Hi"}
    assert (answer.finish_reason, answer.usage) == ("length", {"completion_tokens": 1})


def test_a_stream_is_parsed_into_the_text_of_its_first_choice() -> None:
    usage: Json = {"choices": [], "usage": {"completion_tokens": 2}}
    events = [chunk("H"), KEEP_ALIVE, chunk("x", index=1), chunk("i", "stop"), encode(usage), DONE]
    answer = COMPLETIONS.parse_stream(events)
    assert (answer.text, answer.finish_reason) == ("Hi", "stop")
    assert answer.usage == {"completion_tokens": 2}


@pytest.mark.parametrize("body", [{}, {"choices": None}, {"choices": []}, {"choices": [3]}])
def test_a_body_without_choices_is_not_an_answer(body: Json) -> None:
    with pytest.raises(ValueError, match="no choices"):
        COMPLETIONS.parse_answer(body)


def test_a_stream_that_broke_off_or_has_an_error_is_not_an_answer() -> None:
    with pytest.raises(ValueError, match="finish_reason"):
        COMPLETIONS.parse_stream([chunk("Hi")])
    with pytest.raises(ValueError, match="odd"):
        COMPLETIONS.parse_stream([chunk("Hi"), encode({"error": {"message": "odd"}}), DONE])
