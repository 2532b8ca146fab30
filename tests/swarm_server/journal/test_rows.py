"""A captured call is read from the journal bit by bit as it was written, or is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swarm_server.samples import call

from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.rows import (
    NUM_HASHED,
    CallRows,
    CorruptCall,
    call_row,
    parse_call_row,
)
from fakevllm_server.journal.store import Journal
from fakevllm_server.types.calls import RecordedCall, VersionSpan
from fakevllm_server.types.token_masks import TokenMasks, packed
from tests.swarm_server.journal.disk_faults import rows

MAX_INT32 = 2**31 - 1
IDS = st.lists(st.integers(0, MAX_INT32), max_size=20)
# Only calls with finite numbers are captured, and only these are accepted from a proxy.
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = FINITE | st.sampled_from([-0.0, 5e-324, -5e-324, -9998.999999999998, 2.2e-308, 0])
SETS = st.binary(min_size=1, max_size=40).map(packed)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def calls(draw: st.DrawFn) -> RecordedCall:
    ids = draw(IDS)
    num = len(ids)
    position = st.integers(0, num)
    spans = st.builds(VersionSpan, st.integers(0, MAX_INT32), position, position)
    logprobs = st.lists(LOGPROBS, min_size=num, max_size=num)
    allowed_sets = st.lists(st.none() | SETS, min_size=num, max_size=num)
    return RecordedCall(
        prompt_ids=draw(IDS),
        response_ids=ids,
        logprobs=draw(st.none() | logprobs),
        versions=draw(st.lists(spans, max_size=4)),
        temperature=draw(FINITE),
        finish_reason=draw(st.none() | WORDS),
        untrainable=draw(st.none() | WORDS),
        allowed=draw(st.none() | allowed_sets.map(TokenMasks.from_packed_sets)),
        replica=draw(st.none() | WORDS),
    )


def bits(call: RecordedCall) -> tuple[RecordedCall, bytes]:
    """Return the call and the bytes of its floats, because -0.0 equals 0.0 but differs in bits."""
    floats = [*(call.logprobs or ()), call.temperature]
    return call, struct.pack(f"{len(floats)}d", *floats)


@given(call=calls())
@example(call=replace(call(), temperature=5e-324, logprobs=[-5e-324, -0.0]))
def test_a_call_is_read_back_bit_by_bit(call: RecordedCall) -> None:
    assert bits(parse_call_row(call_row(call))) == bits(call)


def test_the_row_of_a_call_names_a_replica_only_in_a_fleet() -> None:
    assert "replica" not in call_row(call())[3]
    assert '"replica":"replica-1"' in call_row(replace(call(), replica="replica-1"))[3]


@given(groups=st.lists(calls(), min_size=1, max_size=2 * NUM_HASHED), order=st.data())
def test_calls_of_alternating_groups_have_the_rows_of_single_calls(
    groups: list[RecordedCall], order: st.DataObject
) -> None:
    rows = CallRows()
    for one in order.draw(st.lists(st.sampled_from(groups), max_size=40)):
        assert rows.row(one) == call_row(one)


@given(call=calls(), data=st.data())
def test_a_call_with_a_changed_byte_is_refused(call: RecordedCall, data: st.DataObject) -> None:
    row = [part.encode() if isinstance(part, str) else part for part in call_row(call)]
    column = data.draw(st.sampled_from([index for index, part in enumerate(row) if part]))
    raw = bytearray(row[column] or b"")
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    row[column] = bytes(raw)
    _refused(row)


@given(call=calls(), column=st.integers(0, 4), more=st.binary(min_size=1, max_size=8))
def test_a_call_with_a_longer_or_shorter_column_is_refused(
    call: RecordedCall, column: int, more: bytes
) -> None:
    row = [part.encode() if isinstance(part, str) else part for part in call_row(call)]
    _refused([*row[:column], (row[column] or b"") + more, *row[column + 1 :]])
    if row[column]:
        _refused([*row[:column], (row[column] or b"")[:-1], *row[column + 1 :]])


def test_a_call_with_bytes_moved_between_columns_is_refused() -> None:
    prompt, response, logprobs, facts, digest = call_row(call())
    with pytest.raises(CorruptCall):
        parse_call_row((prompt + response[:4], response[4:], logprobs, facts, digest))


def test_missing_logprobs_differ_from_an_empty_list() -> None:
    without, empty = replace(call(ids=()), logprobs=None), call(ids=())
    assert parse_call_row(call_row(without)).logprobs is None
    assert parse_call_row(call_row(empty)).logprobs == []
    prompt, response, _, facts, digest = call_row(empty)
    with pytest.raises(CorruptCall):
        parse_call_row((prompt, response, None, facts, digest))


async def test_a_call_survives_the_journal_file_unchanged(journal: Journal, path: Path) -> None:
    one = replace(
        call(),
        allowed=TokenMasks.from_packed_sets([None, packed(b"\x81")]),
        logprobs=[-5e-324, -0.1],
    )
    await journal.write(row_changes.call_recorded("g/0", 0, one, "g"))
    ((stored,),) = journal.read(reads.calls_by_sibling, "g", 1)
    assert bits(stored) == bits(one)
    assert rows(path, "SELECT COUNT(*) FROM calls") == [(1,)]


async def test_a_call_that_is_written_twice_is_stored_once(journal: Journal) -> None:
    put = row_changes.call_recorded("g/0", 0, call(), "g")
    again = row_changes.call_recorded("g/0", 0, call(version=9), "g")
    await journal.write(put, put, again)
    assert journal.read(reads.calls_by_sibling, "g", 1) == [[call()]]


def _refused(row: list[bytes | None]) -> None:
    prompt_ids, response_ids, logprobs, facts, digest = row
    assert prompt_ids is not None and response_ids is not None
    assert facts is not None and digest is not None
    # SQLite cannot return text that is no longer valid UTF-8.
    try:
        text = facts.decode()
    except UnicodeDecodeError:
        return
    with pytest.raises(CorruptCall):
        parse_call_row((prompt_ids, response_ids, logprobs, text, digest))
