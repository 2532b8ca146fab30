"""Duration for which a request is held and retried. Time is a number in these tests."""

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
from fakevllm_adapters.protocol.outage_reasons import OutageReason, reason_from_header

ENGINE_REASONS = (
    OutageReason.ENGINE_NOT_READY,
    OutageReason.ENGINE_FAILED,
    OutageReason.ENGINE_BUSY,
)
REFUSED = (OutageReason.SERVER_UNREACHABLE, OutageReason.ENGINE_NOT_READY)


@given(
    limit_s=st.floats(0, 100),
    reasons=st.lists(st.sampled_from(OutageReason), min_size=1, max_size=300),
    attempt_s=st.floats(0, 3),
)
def test_a_request_is_held_no_longer_than_its_limit_and_retried_once_at_its_end(
    limit_s: float, reasons: list[OutageReason], attempt_s: float
) -> None:
    schedule, now_s = RetrySchedule(limit_s, 50.0), 50.0
    for reason in reasons:
        pause_s = schedule.pause(reason, now_s)
        if pause_s is None:
            return
        assert 0 < pause_s <= MAX_PAUSE_S
        assert now_s + pause_s <= 50.0 + limit_s + 1e-9
        now_s += pause_s + attempt_s


@given(reason=st.sampled_from(REFUSED), attempt_s=st.floats(0, 0.01))
def test_a_server_that_refuses_at_once_is_retried_until_the_limit(
    reason: OutageReason, attempt_s: float
) -> None:
    schedule, now_s, num_retries = RetrySchedule(20.0, 0.0), 0.0, 0
    while (pause_s := schedule.pause(reason, now_s)) is not None:
        now_s += pause_s + attempt_s
        num_retries += 1
    assert now_s >= 20.0 and 20 <= num_retries <= 40


def test_a_request_that_failed_in_the_engine_is_not_retried() -> None:
    assert RetrySchedule(20.0, 0.0).pause(OutageReason.ENGINE_FAILED, 0.0) is None


def test_a_request_is_sent_again_to_two_restarted_servers() -> None:
    schedule = RetrySchedule(20.0, 0.0)
    for broke_off_s in (0.0, 4.0):
        assert schedule.pause(OutageReason.SERVER_BROKE_OFF, broke_off_s) is not None
        restarts = schedule.pause(OutageReason.SERVER_UNREACHABLE, broke_off_s + 0.1)
        assert restarts is not None
    assert schedule.pause(OutageReason.SERVER_BROKE_OFF, 8.0) is None


def test_connections_that_break_while_no_server_runs_are_no_further_attempts() -> None:
    schedule = RetrySchedule(20.0, 0.0)
    for broke_off_s in (1.0, 2.0, 3.0, 4.0, 5.0):  # for example, a gateway without a server
        pause_s = schedule.pause(OutageReason.SERVER_BROKE_OFF, broke_off_s, last_answered_s=0.9)
        assert pause_s is not None
    for broke_off_s, answered_s in ((7.0, 6.0), (9.0, 8.0)):
        pause_s = schedule.pause(
            OutageReason.SERVER_BROKE_OFF, broke_off_s, last_answered_s=answered_s
        )
        assert (pause_s is None) == (broke_off_s == 9.0)


def test_a_request_does_not_wait_for_an_engine_that_was_stopped() -> None:
    assert (
        RetrySchedule(20.0, 0.0).pause(OutageReason.ENGINE_NOT_READY, 0.0, may_succeed=False)
        is None
    )
    assert (
        RetrySchedule(20.0, 0.0).pause(OutageReason.SERVER_UNREACHABLE, 0.0, may_succeed=False)
        is not None
    )


def test_with_a_limit_of_zero_no_request_is_held() -> None:
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
def test_a_request_is_held_for_at_most_half_of_its_clients_timeout(
    headers: dict[bytes, bytes], held_s: float
) -> None:
    assert max_hold_s(25.0, headers) == held_s


@given(st.integers(100, 599), st.sampled_from([None, *ENGINE_REASONS]), st.text())
def test_only_a_status_of_a_temporary_failure_is_an_outage(
    status: int, header_reason: OutageReason | None, message: str
) -> None:
    assert (outage_reason(status, header_reason, message) is not None) == (
        status in (429, 502, 503, 504)
    )


MESSAGES = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "The engine is not ready: ENGINE.BOOTING.",
            "The engine did not answer; it is being started again.",
            "Too many requests are waiting.",
        ]
    ),
)


@given(
    status=st.sampled_from(OUTAGES),
    header_reason=st.sampled_from(ENGINE_REASONS),
    messages=st.data(),
)
def test_the_reason_in_the_header_decides_whatever_the_message(
    status: int, header_reason: OutageReason, messages: st.DataObject
) -> None:
    body = orjson.dumps(unavailable(messages.draw(MESSAGES)).body)
    assert outage_error(status, body, [], header_reason).reason is header_reason


def test_an_unknown_reason_of_a_newer_server_counts_as_none() -> None:
    assert reason_from_header("engine_on_fire") is None
    assert [reason_from_header(reason) for reason in ENGINE_REASONS] == list(ENGINE_REASONS)


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
def test_without_the_header_the_message_distinguishes_a_busy_engine_from_a_failed_one(
    status: int, message: str, is_busy: bool
) -> None:
    assert (outage_reason(status, None, message) is OutageReason.ENGINE_BUSY) == is_busy


@pytest.mark.parametrize("reason", [OutageReason.ENGINE_BUSY, OutageReason.ENGINE_NOT_READY])
def test_a_request_that_cannot_succeed_is_not_retried(reason: OutageReason) -> None:
    assert RetrySchedule(10.0, 0.0).pause(reason, 0.0) == FIRST_PAUSE_S
    assert RetrySchedule(10.0, 0.0).pause(reason, 0.0, may_succeed=False) is None


@pytest.mark.parametrize(
    ("header", "retry_s"), [(b"2", 2), (b"100", MAX_RETRY_AFTER_S), (b"soon", 2), (None, 2)]
)
def test_the_retry_after_of_a_client_is_limited(header: bytes | None, retry_s: int) -> None:
    headers = [] if header is None else [(b"retry-after", header)]
    error = outage_error(503, b"<html>", headers)
    assert error.retry_after_s == retry_s and error.body["error"]["code"] == 503


def test_an_outage_without_a_message_is_an_outage_too() -> None:
    for raw in (b'{"error":{"code":503}}', b'{"error":null}', b"<html>", b"[]"):
        assert outage_error(503, raw, []).reason is OutageReason.ENGINE_FAILED
