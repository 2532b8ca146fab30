"""Tests of the corpus, the masks and the comparison, without an engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.differential.comparison import differences
from tests.differential.corpus import REASONING, Request, corpus
from tests.differential.engines import SIBLINGS
from tests.differential.known_differences import KNOWN, KnownDifference, missing, unexplained
from tests.differential.raw_http import RawResponse
from tests.differential.table import FILE, page

FORMATS = ("chat", "completions", "responses", "messages")


def test_there_are_many_requests_in_all_four_formats() -> None:
    counts = Counter(name.partition(":")[0] for name in corpus())
    reasoning = {format: counts.pop(f"{REASONING} {format}") for format in FORMATS}
    assert {*FORMATS, "around", "keys"} == counts.keys()
    assert counts.total() >= 150 and min(counts.values()) >= 30, counts
    assert sum(reasoning.values()) >= 30 and min(reasoning.values()) >= 3, reasoning


def test_the_names_of_requests_to_the_reasoning_model_say_so() -> None:
    for name, request in corpus().items():
        assert request.is_reasoning == name.startswith(f"{REASONING} ")


def test_a_request_follows_an_existing_request_that_follows_none() -> None:
    following = [request for request in corpus().values() if request.follows is not None]
    assert following
    assert all(corpus()[request.follows or ""].follows is None for request in following)


def test_each_known_difference_names_existing_requests() -> None:
    for entry in KNOWN:
        assert entry.differs and entry.why
        for pattern in entry.requests:
            alone = KnownDifference("", "", "", "", (pattern,), (), entry.setups)
            assert any(alone.covers(name, setup) for name in corpus() for setup in SIBLINGS), (
                pattern
            )


def test_the_page_is_up_to_date_with_the_tables() -> None:
    assert FILE.read_text() == page(), "Write the page again: python -m tests.differential.table"


JSON = [("content-type", "application/json"), ("vary", "Origin"), ("date", "now")]
STREAM = [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")]


def response(body: bytes, status: int = 200, headers: list[tuple[str, str]] = JSON) -> RawResponse:
    return RawResponse(status, headers, body)


def chunk(text: str, finish: str = "null", id: str = "a") -> bytes:
    end = ',"stop_reason":null' if finish != "null" else ""
    delta = f'{{"content":"{text}"}}' if text else "{}"
    return (
        f'data: {{"id":"chatcmpl-{id * 16}","choices":[{{"index":0,"delta":{delta},'
        f'"logprobs":null,"finish_reason":{finish}{end},"token_ids":null}}]}}\n\n'
    ).encode()


DONE = b"data: [DONE]\n\n"
STOP = '"stop"'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"id":"chatcmpl-0123456789abcdef"}', b'{"id":"chatcmpl-fedcba9876543210"}'),
        (b'{"created":1795277818}', b'{"created":1795277819}'),
        (b'{"logprob":-0.5}', b'{"logprob":-0.25}'),
    ],
)
def test_ids_times_and_logprobs_may_differ(one: bytes, other: bytes) -> None:
    assert differences(response(one), response(other)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"id":"chatcmpl-0123456789abcdef"}', b'{"id":"chatcmpl-01234567"}'),
        (b'{"id":"chatcmpl-0123456789abcdef"}', b'{"id":"cmpl-0123456789abcdef"}'),
        (b'{"created":1795277818}', b'{"created":1795277818.5}'),
        (b'{"created":1795277818}', b'{"created":null}'),
        (b'{"a":1,"b":2}', b'{"b":2,"a":1}'),
        (b'{"a":null}', b"{}"),
        (b'{"a":"x"}', b'{"a":"y"}'),
        (b'{"a":1}', b'{"a":1.0}'),
        (b'{"a":[1]}', b'{"a":[1,1]}'),
        (b'{"a":1}', b'{"a": 1}'),
        (b'{"a":1e-05}', b'{"a":1e-5}'),
        (b'{"a":true}', b'{"a":1}'),
        (b"", b"{}"),
        (b"OK", b"ok"),
    ],
)
def test_any_other_difference_of_a_body_is_found(one: bytes, other: bytes) -> None:
    assert differences(response(one), response(other))


def test_a_different_status_or_header_is_found() -> None:
    assert differences(response(b"{}"), response(b"{}", 201))[0] == "status: 200 -> 201"
    assert differences(response(b"{}"), response(b"{}", headers=[*JSON, ("x-more", "1")]))
    assert differences(response(b"{}"), response(b"{}", headers=JSON[:1]))
    assert not differences(response(b"{}"), response(b"{}", headers=[*JSON[:2], ("date", "later")]))


WHOLE = [chunk("3"), chunk(" plus"), chunk(" 4"), chunk("", STOP), DONE]


@pytest.mark.parametrize(
    "other",
    [
        [chunk("3 plus 4"), chunk("", STOP), DONE],
        [chunk("3"), chunk(" plus 4", STOP), DONE],
        [chunk("3", id="b"), b": keep-alive\n\n", chunk(" plus 4", STOP, id="b"), DONE],
    ],
)
def test_a_stream_may_be_split_into_chunks_differently(other: list[bytes]) -> None:
    assert differences(streamed(WHOLE), streamed(other)) == []


@pytest.mark.parametrize(
    "other",
    [
        WHOLE[:-1],
        [*WHOLE[:3], DONE],
        [chunk("3 plus 5"), chunk("", STOP), DONE],
        [chunk("3"), chunk(""), chunk(" plus 4"), chunk("", STOP), DONE],
        [chunk("3"), chunk(" plus 4", id="b"), chunk("", STOP), DONE],
        [chunk("3 plus 4"), chunk("", '"length"'), DONE],
        [DONE, *WHOLE[:-1]],
        [part.replace(b'"token_ids":null', b'"token_ids":[]') for part in WHOLE],
        [part.replace(b',"token_ids":null', b"") for part in WHOLE],
        [part.replace(b"data: ", b"event: x\ndata: ") for part in WHOLE],
    ],
)
def test_any_other_difference_of_a_stream_is_found(other: list[bytes]) -> None:
    assert differences(streamed(WHOLE), streamed(other))


def delta(delta: str, ids: str = "null", finish: str = "null") -> bytes:
    end = ',"stop_reason":null' if finish != "null" else ""
    return (
        f'data: {{"id":"chatcmpl-{"a" * 16}","choices":[{{"index":0,"delta":{delta},'
        f'"logprobs":null,"finish_reason":{finish}{end},"token_ids":{ids}}}]}}\n\n'
    ).encode()


REASONED = [
    delta('{"reasoning":"hm"}', "[1]"),
    delta("{}", "[2]"),
    delta('{"content":"7"}', "[3]"),
    delta("{}", "[4]", STOP),
    DONE,
]
CALL = '{"id":"call_1","index":0,"function":{"name":"add"}}'
REST = '{"index":0,"function":{"arguments":"{}"}}'


@pytest.mark.parametrize(
    "other",
    [
        [delta('{"reasoning":"hm","content":"7"}', "[1,2,3]"), *REASONED[3:]],
        [delta('{"reasoning":"hm"}', "[1,2]"), *REASONED[2:]],
        [delta('{"reasoning":"hm","content":"7"}', "[1,2,3,4]", STOP), DONE],
        [*REASONED[:2], delta('{"content":"7"}', "[3,4]", STOP), DONE],
    ],
)
def test_reasoning_may_come_in_one_chunk_with_the_text_after_it(other: list[bytes]) -> None:
    assert differences(streamed(REASONED), streamed(other)) == []


@pytest.mark.parametrize(
    "other",
    [
        [REASONED[0], *REASONED[2:]],
        [delta('{"content":"7"}', "[1,2,3]"), *REASONED[3:]],
        [delta('{"reasoning":"hm","content":null}', "[1,2]"), *REASONED[2:]],
        [delta('{"content":"7"}', "[1]"), delta('{"reasoning":"hm"}', "[2,3]"), *REASONED[3:]],
        [REASONED[0], delta("{}"), *REASONED[1:]],
    ],
)
def test_any_other_difference_of_reasoning_is_found(other: list[bytes]) -> None:
    assert differences(streamed(REASONED), streamed(other))


def test_the_prompts_ids_may_come_with_more_or_less_text() -> None:
    def piece(text: str, prompt: str, finish: str = "null") -> bytes:
        return (
            f'data: {{"id":"cmpl-{"a" * 16}","choices":[{{"index":0,"text":"{text}",'
            f'"finish_reason":{finish},"stop_reason":null,"prompt_token_ids":{prompt}}}]}}\n\n'
        ).encode()

    end = [piece("", "null", STOP), DONE]
    apart = [piece("a", "[1]"), piece("b", "null"), *end]
    assert differences(streamed(apart), streamed([piece("ab", "[1]"), *end])) == []
    assert differences(streamed(apart), streamed([piece("ab", "null"), *end]))


@pytest.mark.parametrize("before", ["", '"reasoning":null,'])
def test_the_pieces_of_a_tool_call_may_come_in_one_chunk(before: str) -> None:
    apart = [delta(f'{{{before}"tool_calls":[{piece}]}}') for piece in (CALL, REST)]
    together = [delta(f'{{{before}"tool_calls":[{CALL},{REST}]}}')]
    end = [delta("{}", finish=STOP), DONE]
    assert differences(streamed([*apart, *end]), streamed([*together, *end])) == []
    assert differences(streamed([*apart, *end]), streamed([*apart[:1], *end]))


def streamed(events: list[bytes]) -> RawResponse:
    return response(b"".join(events), headers=STREAM)


def test_free_texts_may_differ_and_their_shapes_may_not() -> None:
    one: Any = b'{"choices":[{"text":"a","finish_reason":"stop"}]}'
    other: Any = b'{"choices":[{"text":"b","finish_reason":"stop"}]}'
    assert differences(response(one), response(other), is_free=True) == []
    assert differences(response(one), response(other.replace(b'"stop"', b"null")), is_free=True)
    assert differences(response(one, 400), response(other, 400), is_free=True)


def test_a_known_difference_explains_only_its_own_lines_and_must_occur() -> None:
    entry = KnownDifference("", "", "", "", ("chat: *",), ("body.a: *",))
    assert entry.covers("chat: a", "N=1") and not entry.covers("around: a", "N=1")
    assert unexplained(["body.a: 1 -> 2", "header x: 1 -> 2"], [entry]) == ["header x: 1 -> 2"]
    assert unexplained(["body.a: 1 -> 2"], []) and not missing(["body.a: 1 -> 2"], [entry])
    assert missing(["body.b: 1 -> 2"], [entry]) == ["body.a: *"]


def test_each_of_several_known_differences_must_occur() -> None:
    entries = [KnownDifference("", "", "", "", ("chat: *",), (f"body.{key}: *",)) for key in "ab"]
    lines = ["body.a: 1 -> 2", "body.b: 1 -> 2"]
    assert not unexplained(lines, entries) and not missing(lines, entries)
    assert missing(lines[:1], entries) == ["body.b: *"]


def test_a_known_status_also_explains_body_and_headers() -> None:
    entry = KnownDifference("", "", "", "", ("chat: *",), ("status: * -> 404",))
    lines = ["status: 400 -> 404", "header x: 1 -> 2", "body: 1 -> 2"]
    assert not unexplained(lines, [entry]) and not missing(lines, [entry])
    assert unexplained(["status: 400 -> 500", *lines[1:]], [entry]) == ["status: 400 -> 500"]


def test_a_request_that_follows_another_has_the_responses_id() -> None:
    request = Request("x: y", "POST", "/v1/responses/{id}", {}, b'{"a":"{id}"}', follows="x: z")
    after = request.after("resp_1")
    assert (after.path, after.body) == ("/v1/responses/resp_1", b'{"a":"resp_1"}')
