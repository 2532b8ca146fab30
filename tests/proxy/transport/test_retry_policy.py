"""How long a request is held, and when it is given up. Time is a number here."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.transport.retry_policy import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MAX_RETRY_AFTER_S,
    OUTAGES,
    RetrySchedule,
    max_hold_s,
    outage_error,
    outage_reason,
)
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.reasons import OutageReason, reason_from_header

ENGINES_REASONS = (
    OutageReason.ENGINE_NOT_READY,
    OutageReason.ENGINE_FAILED,
    OutageReason.ENGINE_BUSY,
)
REFUSED = (OutageReason.SERVER_UNREACHABLE, OutageReason.ENGINE_NOT_READY)


@given(
    limit_s=st.floats(0, 100),
    reasons=st.lists(st.sampled_from(OutageReason), min_size=1, max_size=300),
    took_s=st.floats(0, 3),
)
def test_a_request_is_held_no_longer_than_its_limit_and_tried_once_more_at_its_end(
    limit_s: float, reasons: list[OutageReason], took_s: float
) -> None:
    hold, now_s = RetrySchedule(limit_s, 50.0), 50.0
    for reason in reasons:
        pause_s = hold.pause(reason, now_s)
        if pause_s is None:
            return
        assert 0 < pause_s <= MAX_PAUSE_S
        assert now_s + pause_s <= 50.0 + limit_s + 1e-9
        now_s += pause_s + took_s


@given(reason=st.sampled_from(REFUSED), took_s=st.floats(0, 0.01))
def test_who_refuses_at_once_is_asked_until_the_limit(reason: OutageReason, took_s: float) -> None:
    hold, now_s, num_tries = RetrySchedule(20.0, 0.0), 0.0, 0
    while (pause_s := hold.pause(reason, now_s)) is not None:
        now_s += pause_s + took_s
        num_tries += 1
    assert now_s >= 20.0 and 20 <= num_tries <= 40


def test_a_request_that_an_engine_failed_is_not_sent_into_it_again() -> None:
    assert RetrySchedule(20.0, 0.0).pause(OutageReason.ENGINE_FAILED, 0.0) is None


def test_a_request_that_was_at_work_when_the_server_went_is_sent_again_once() -> None:
    hold = RetrySchedule(20.0, 0.0)
    assert hold.pause(OutageReason.SERVER_BROKE_OFF, 0.0) is not None
    assert hold.pause(OutageReason.SERVER_UNREACHABLE, 0.1) is not None, "it is starting again"
    assert hold.pause(OutageReason.SERVER_BROKE_OFF, 5.0) is None


def test_an_engine_that_was_stopped_is_not_waited_for() -> None:
    assert (
        RetrySchedule(20.0, 0.0).pause(OutageReason.ENGINE_NOT_READY, 0.0, may_succeed=False)
        is None
    )
    assert (
        RetrySchedule(20.0, 0.0).pause(OutageReason.SERVER_UNREACHABLE, 0.0, may_succeed=False)
        is not None
    )


def test_without_a_limit_nobody_is_held() -> None:
    assert RetrySchedule(0.0, 7.0).pause(OutageReason.SERVER_UNREACHABLE, 7.0) is None


@pytest.mark.parametrize(
    ("headers", "held_s"),
    [
        ({}, 25.0),
        ({b"x-stainless-read-timeout": b"600"}, 25.0),
        ({b"x-stainless-read-timeout": b"4.0"}, 2.0),
        ({b"x-stainless-timeout": b"10"}, 5.0),
        ({b"x-stainless-timeout": b"10", b"x-stainless-read-timeout": b"2"}, 1.0),
        ({b"x-stainless-read-timeout": b"NOT_GIVEN"}, 25.0),
        ({b"x-stainless-read-timeout": b"nan"}, 25.0),
        ({b"x-stainless-read-timeout": b"-1"}, 25.0),
    ],
)
def test_a_request_is_held_for_half_of_what_its_client_waits(
    headers: dict[bytes, bytes], held_s: float
) -> None:
    assert max_hold_s(25.0, headers) == held_s


@given(st.integers(100, 599), st.sampled_from([None, *ENGINES_REASONS]), st.text())
def test_only_a_status_that_heals_is_an_outage(
    status: int, sent: OutageReason | None, message: str
) -> None:
    assert (outage_reason(status, sent, message) is not None) == (status in (429, 502, 503, 504))


SENTENCES = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "The engine is not ready: ENGINE.BOOTING.",
            "The engine did not answer; it is being started again.",
            "Too many requests are waiting.",
        ]
    ),
)


@given(status=st.sampled_from(OUTAGES), sent=st.sampled_from(ENGINES_REASONS), sentences=st.data())
def test_the_reason_in_the_header_decides_whatever_the_sentence(
    status: int, sent: OutageReason, sentences: st.DataObject
) -> None:
    body = orjson.dumps(unavailable(sentences.draw(SENTENCES)).body)
    assert outage_error(status, body, [], sent).reason is sent


def test_a_reason_that_only_newer_servers_know_counts_as_none() -> None:
    assert reason_from_header("engine_on_fire") is None
    assert [reason_from_header(reason) for reason in ENGINES_REASONS] == list(ENGINES_REASONS)


@pytest.mark.parametrize(
    ("status", "message", "is_busy"),
    [
        (429, "", True),
        (503, "Too many requests are waiting.", True),
        (503, "The engine did not answer; it is being started again.", False),
        (503, "The engine was waited for in vain for 300 s.", False),
        (503, "The engine is shutting down.", False),
        (503, "", False),
        (502, "Too many requests are waiting.", False),
    ],
)
def test_without_the_header_the_sentences_of_old_servers_tell_a_busy_engine_from_a_failed_one(
    status: int, message: str, is_busy: bool
) -> None:
    assert (outage_reason(status, None, message) is OutageReason.ENGINE_BUSY) == is_busy


@pytest.mark.parametrize("reason", [OutageReason.ENGINE_BUSY, OutageReason.ENGINE_NOT_READY])
def test_who_will_not_take_it_is_not_asked_again(reason: OutageReason) -> None:
    assert RetrySchedule(10.0, 0.0).pause(reason, 0.0) == FIRST_PAUSE_S
    assert RetrySchedule(10.0, 0.0).pause(reason, 0.0, may_succeed=False) is None


@pytest.mark.parametrize(
    ("told", "retry_s"), [(b"2", 2), (b"100", MAX_RETRY_AFTER_S), (b"soon", 2), (None, 2)]
)
def test_no_client_is_told_to_sleep_for_long(told: bytes | None, retry_s: int) -> None:
    headers = [] if told is None else [(b"retry-after", told)]
    error = outage_error(503, b"<html>", headers)
    assert error.retry_after_s == retry_s and error.body["error"]["code"] == 503


def test_an_outage_without_a_message_is_an_outage_all_the_same() -> None:
    for raw in (b'{"error":{"code":503}}', b'{"error":null}', b"<html>", b"[]"):
        assert outage_error(503, raw, []).reason is OutageReason.ENGINE_FAILED
