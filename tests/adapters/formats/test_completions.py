from typing import Any

import pytest

from fakevllm_adapters.formats.base import Engine
from fakevllm_adapters.formats.completions import CompletionsAdapter
from fakevllm_adapters.formats.sse import DONE, KEEP_ALIVE, encode

COMPLETIONS = CompletionsAdapter()
Json = dict[str, Any]


def chunk(text: Any, finish: str | None = None, index: int = 0) -> bytes:
    return encode({"choices": [{"index": index, "text": text, "finish_reason": finish}]})


WHOLE = b'{"choices": [{}]}'


def test_the_exchange_changes_nothing_in_either_direction() -> None:
    asked: Json = {"prompt": "hi", "stream": True, "frobnicate": 1}
    exchange = COMPLETIONS.open(asked, Engine())
    assert exchange.body is asked and exchange.streamed
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
def test_the_question_is_the_first_prompt_where_it_is_text(prompt: Any, text: str) -> None:
    asked = {"prompt": prompt}
    assert COMPLETIONS.question(asked) == COMPLETIONS.opening(asked) == text
    assert COMPLETIONS.question({}) == ""


def test_siblings_sample_from_the_whole_distribution_and_the_lead_is_the_apps_own() -> None:
    asked: Json = {"prompt": "hi", "temperature": 0.3, "top_p": 0.5, "seed": 7}
    assert COMPLETIONS.sibling(asked, 0, 1.0) is asked
    changed = COMPLETIONS.sibling(asked, 2, 1.0)
    assert (changed["temperature"], changed["top_p"], changed["seed"]) == (1.0, 1.0, 9)
    assert changed["prompt"] == "hi"


def test_an_answer_is_read_as_an_assistants_message() -> None:
    choice: Json = {"index": 0, "text": "Hi", "finish_reason": "length"}
    answer = COMPLETIONS.read_json({"choices": [choice], "usage": {"completion_tokens": 1}})
    assert answer.message == {"role": "assistant", "content": "Hi"}
    assert (answer.finish_reason, answer.usage) == ("length", {"completion_tokens": 1})


def test_a_stream_adds_up_to_the_text_of_its_first_choice() -> None:
    usage: Json = {"choices": [], "usage": {"completion_tokens": 2}}
    events = [chunk("H"), KEEP_ALIVE, chunk("x", index=1), chunk("i", "stop"), encode(usage), DONE]
    answer = COMPLETIONS.read_events(events)
    assert (answer.text, answer.finish_reason) == ("Hi", "stop")
    assert answer.usage == {"completion_tokens": 2}


@pytest.mark.parametrize("body", [{}, {"choices": None}, {"choices": []}, {"choices": [3]}])
def test_a_body_without_choices_is_no_answer(body: Json) -> None:
    with pytest.raises(ValueError, match="no choices"):
        COMPLETIONS.read_json(body)


def test_a_stream_that_broke_off_or_holds_an_error_is_no_answer() -> None:
    with pytest.raises(ValueError, match="finish_reason"):
        COMPLETIONS.read_events([chunk("Hi")])
    with pytest.raises(ValueError, match="odd"):
        COMPLETIONS.read_events([chunk("Hi"), encode({"error": {"message": "odd"}}), DONE])
