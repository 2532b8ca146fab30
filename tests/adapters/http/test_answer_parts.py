"""Several answers in one response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.http.answer_parts import AnswerPart, PartDecoder, PartEncoder

ENCODER = PartEncoder("boundary")
(CONTENT_TYPE,) = [value.decode() for _, value in ENCODER.headers]
HEADERS = [(b"content-type", b"application/json"), (b"x-request-id", b"a")]
PARTS = st.lists(
    st.builds(AnswerPart, st.integers(0, 255), st.just(HEADERS), st.binary(max_size=40)),
    max_size=5,
)


@given(PARTS, st.lists(st.integers(1, 60)))
def test_parts_are_read_whatever_the_chunk_boundaries_are(
    parts: list[AnswerPart], sizes: list[int]
) -> None:
    raw = b"".join(map(ENCODER.part, parts)) + ENCODER.end()
    decoder, found, at = PartDecoder(CONTENT_TYPE), list[AnswerPart](), 0
    for size in [*sizes, len(raw)]:
        found += decoder.feed(raw[at : at + size])
        at += size
    assert found == parts


def test_a_part_may_contain_the_boundary_and_the_end_of_headers() -> None:
    part = AnswerPart(1, [], b"--boundary--\r\n\r\n--boundary\r\n")
    assert PartDecoder(CONTENT_TYPE).feed(ENCODER.part(part)) == [part]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"--boundary\r\nx-fakevllm-sibling: 1\r\n\r\n",
        b"--boundary\r\ncontent-length: 1\r\n\r\na\r\n",
        b"--boundary\r\nno header\r\n\r\n",
        b"--boundary\r\n" + b"a" * 2**17,
    ],
)
def test_a_malformed_part_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        PartDecoder(CONTENT_TYPE).feed(raw)


def test_the_parts_before_a_malformed_one_are_read() -> None:
    decoder, part = PartDecoder(CONTENT_TYPE), AnswerPart(1, HEADERS, b"a")
    assert decoder.feed(ENCODER.part(part) + b"--other\r\n\r\n") == [part]
    with pytest.raises(ValueError):
        decoder.feed(b"")


@pytest.mark.parametrize("content_type", ["", "text/event-stream", "multipart/mixed"])
def test_a_response_of_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(ValueError):
        PartDecoder(content_type)
