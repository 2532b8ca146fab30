import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import (
    DONE,
    KEEP_ALIVE,
    SseDecoder,
    data_of,
    encode,
    parse_event,
    parse_events,
)

STREAM = [encode({"a": "ü\n"}), KEEP_ALIVE, b"event: x\r\ndata: 1\r\n\r\n", DONE]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_events_are_decoded_unchanged_however_the_bytes_are_split(sizes: list[int]) -> None:
    raw, at = b"".join(STREAM), 0
    decoder = SseDecoder()
    events: list[bytes] = []
    for size in sizes:
        events += decoder.feed(raw[at : at + size])
        at += size
    events += decoder.feed(raw[at:])
    assert events == STREAM
    assert decoder.rest() == b""


def test_an_incomplete_event_is_held_back() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n") == []
    assert decoder.rest() == b"data: 1\n"


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"data: a\r\n\r\n", b"a"),
        (KEEP_ALIVE, None),
        (DONE, None),
        (b"event: ping\n\n", None),
    ],
)
def test_data_lines_are_extracted_from_an_event(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


def test_only_json_objects_are_parsed_from_an_event() -> None:
    assert parse_event(encode({"a": 1})) == {"a": 1}
    assert parse_event(encode([1])) is None


def test_many_events_are_parsed_like_single_events() -> None:
    events = [encode({"a": 1}), KEEP_ALIVE, encode([1]), encode({}), DONE]
    assert parse_events(events) == [{"a": 1}, {}]
    assert parse_events([]) == []


@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2).map(encode),
            st.sampled_from([*STREAM, b"data:{}\n\n", b"data: {\ndata: }\n\n", encode([1])]),
            st.sampled_from([b"data: \n\n", b"data: {},{}\n\n", b"\n\n", b'data: "[DONE]"\n\n']),
        ),
        max_size=6,
    )
)
def test_events_that_are_parsed_as_one_text_are_parsed_like_single_events(
    events: list[bytes],
) -> None:
    try:
        expected = [value for event in events if (value := parse_event(event)) is not None]
    except ValueError:
        with pytest.raises(ValueError):
            parse_events(events)
    else:
        assert parse_events(events) == expected


@pytest.mark.parametrize("odd", [b'{"a":1', b'{"a":1},{"b":2}', b"", b"]["])
def test_an_event_that_is_not_json_by_itself_is_an_error_among_others(odd: bytes) -> None:
    rest = b'data: "b":2}\n\n'
    with pytest.raises(ValueError):
        parse_events([encode({"a": 1}), b"data: " + odd + b"\n\n", rest])
    with pytest.raises(ValueError):
        parse_events([b"data: " + odd + b"\n\n"])
