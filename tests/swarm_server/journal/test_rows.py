"""A captured call comes back from the journal bit by bit, or not at all."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swarm_server.samples import call

from fakevllm_server.journal import changes, reads
from fakevllm_server.journal.rows import CorruptCall, call_row, parse_call_row
from fakevllm_server.journal.store import Journal
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.types.token_masks import TokenMasks, packed
from tests.swarm_server.journal.disks import rows

MOST = 2**31 - 1
IDS = st.lists(st.integers(0, MOST), max_size=20)
# Only what is finite is captured, and only that is taken from a proxy.
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = FINITE | st.sampled_from([-0.0, 5e-324, -5e-324, -9998.999999999998, 2.2e-308, 0])
SETS = st.binary(min_size=1, max_size=40).map(packed)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def calls(draw: st.DrawFn) -> RecordedCall:
    ids = draw(IDS)
    num = len(ids)
    place = st.integers(0, num)
    spans = st.builds(VersionSpan, st.integers(0, MOST), place, place)
    exactly = st.lists(LOGPROBS, min_size=num, max_size=num)
    chosen_from = st.lists(st.none() | SETS, min_size=num, max_size=num)
    return RecordedCall(
        prompt_ids=draw(IDS),
        response_ids=ids,
        logprobs=draw(st.none() | exactly),
        versions=draw(st.lists(spans, max_size=4)),
        temperature=draw(FINITE),
        finish_reason=draw(st.none() | WORDS),
        untrainable=draw(st.none() | WORDS),
        allowed=draw(st.none() | chosen_from.map(TokenMasks.from_packed_sets)),
    )


def bits(call: RecordedCall) -> tuple[RecordedCall, bytes]:
    """With its floats as they are in memory: -0.0 equals 0.0, and is another number."""
    floats = [*(call.logprobs or ()), call.temperature]
    return call, struct.pack(f"{len(floats)}d", *floats)


@given(call=calls())
@example(call=replace(call(), temperature=5e-324, logprobs=[-5e-324, -0.0]))
def test_a_call_comes_back_bit_by_bit(call: RecordedCall) -> None:
    assert bits(parse_call_row(call_row(call))) == bits(call)


@given(call=calls(), data=st.data())
def test_whatever_byte_is_changed_it_is_no_call(call: RecordedCall, data: st.DataObject) -> None:
    row = [part.encode() if isinstance(part, str) else part for part in call_row(call)]
    column = data.draw(st.sampled_from([at for at, part in enumerate(row) if part]))
    raw = bytearray(row[column] or b"")
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    row[column] = bytes(raw)
    _refused(row)


@given(call=calls(), column=st.integers(0, 4), more=st.binary(min_size=1, max_size=8))
def test_what_is_longer_or_shorter_is_no_call(call: RecordedCall, column: int, more: bytes) -> None:
    row = [part.encode() if isinstance(part, str) else part for part in call_row(call)]
    _refused([*row[:column], (row[column] or b"") + more, *row[column + 1 :]])
    if row[column]:
        _refused([*row[:column], (row[column] or b"")[:-1], *row[column + 1 :]])


def test_bytes_that_move_from_one_column_to_the_next_are_no_call() -> None:
    prompt, response, logprobs, facts, digest = call_row(call())
    with pytest.raises(CorruptCall):
        parse_call_row((prompt + response[:4], response[4:], logprobs, facts, digest))


def test_a_call_without_log_probabilities_is_not_one_with_none_of_them() -> None:
    without, empty = replace(call(ids=()), logprobs=None), call(ids=())
    assert parse_call_row(call_row(without)).logprobs is None
    assert parse_call_row(call_row(empty)).logprobs == []
    prompt, response, _, facts, digest = call_row(empty)
    with pytest.raises(CorruptCall):
        parse_call_row((prompt, response, None, facts, digest))


async def test_a_file_holds_it_as_a_row_does(journal: Journal, path: Path) -> None:
    one = replace(
        call(),
        allowed=TokenMasks.from_packed_sets([None, packed(b"\x81")]),
        logprobs=[-5e-324, -0.1],
    )
    await journal.write(changes.call_recorded("g/0", 0, one, "g"))
    ((found,),) = journal.read(reads.calls_by_sibling, "g", 1)
    assert bits(found) == bits(one)
    assert rows(path, "SELECT COUNT(*) FROM calls") == [(1,)]


async def test_of_the_same_call_written_twice_one_is_kept(journal: Journal) -> None:
    put = changes.call_recorded("g/0", 0, call(), "g")
    again = changes.call_recorded("g/0", 0, call(version=9), "g")
    await journal.write(put, put, again)
    assert journal.read(reads.calls_by_sibling, "g", 1) == [[call()]]


def _refused(row: list[bytes | None]) -> None:
    prompt_ids, response_ids, logprobs, facts, digest = row
    assert prompt_ids is not None and response_ids is not None
    assert facts is not None and digest is not None
    # A text that is no UTF-8 any more is read as SQLite gives it: by surrogates or not at all.
    try:
        text = facts.decode()
    except UnicodeDecodeError:
        return
    with pytest.raises(CorruptCall):
        parse_call_row((prompt_ids, response_ids, logprobs, text, digest))
