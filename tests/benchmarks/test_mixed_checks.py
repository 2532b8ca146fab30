"""The checks of benchmarks.mixed_traffic find what they are for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ledger_checks import Finding, check_states, check_trained_once
from benchmarks.mixed_parts.checks import (
    MemoryReading,
    ProcessKill,
    check_apps,
    check_coding,
    check_memory,
    check_one_group_each,
    check_side_calls,
)
from benchmarks.mixed_parts.clients import AppError, ClientRequest, find_error

Json = dict[str, Any]

PROXY = ProcessKill("proxy", 100.0, 3.0)
SERVER = ProcessKill("server", 100.0, 10.0)


def group(name: str, state: str = "trained", reason: str | None = None, **more: Any) -> Json:
    row = {"group_id": name, "question": f"What is {name} plus 3?", "state": state}
    return row | {"reason": reason, "status": 499, "num_resent": 0, "request_json": "{}"} | more


def failed_claims(findings: list[Finding]) -> list[str]:
    return [finding.claim for finding in findings if finding.holds is False]


def request(name: str, started_at: float = 0.0, answered_at: float | None = 1.0) -> ClientRequest:
    return ClientRequest(name, name.partition("-")[0], started_at, answered_at)


def test_a_request_without_an_answer_is_found() -> None:
    answered, unanswered = request("sdk-1"), request("sdk-2", answered_at=None)
    assert failed_claims(check_apps([], [], [], 0)) == ["every request was answered in the end"]
    assert failed_claims(check_apps([answered], [], [], 0)) == []
    assert failed_claims(check_apps([answered, unanswered], [], [], 0)) == [
        "every request was answered in the end"
    ]


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "content", "is_streamed"),
    [
        (CHAT, b'   {"error": {"message": "gone", "code": 503}}', False),
        (MESSAGES, b'{"type": "error", "error": {"message": "gone"}}', False),
        (CHAT, b'data: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n', True),
        (CHAT, b'data: {"choices": [{"delta": {"content": "7"}}]}\n\n', True),
        (RESPONSES, b'event: response.failed\ndata: {"type": "response.failed"}\n\n', True),
    ],
)
def test_an_error_after_status_200_is_found(path: str, content: bytes, is_streamed: bool) -> None:
    assert find_error(path, content, is_streamed) is not None


@pytest.mark.parametrize(
    ("path", "content", "is_streamed"),
    [
        (CHAT, b'   {"choices": [{"message": {"content": "7"}}]}', False),
        (RESPONSES, b'{"status": "completed", "error": null}', False),
        (CHAT, b'data: {"choices": [{"delta": {"content": "7"}}]}\n\ndata: [DONE]\n\n', True),
        (RESPONSES, b"event: response.completed\ndata: {}\n\n", True),
    ],
)
def test_a_complete_answer_has_no_error(path: str, content: bytes, is_streamed: bool) -> None:
    assert find_error(path, content, is_streamed) is None


@pytest.mark.parametrize(("kill", "is_found"), [(PROXY, False), (SERVER, True)])
def test_a_kill_of_the_proxy_explains_an_error_and_a_kill_of_the_server_does_not(
    kill: ProcessKill, is_found: bool
) -> None:
    error = AppError("sdk", 99.0, 102.0, "503")
    claim = "no error reached an app while only the server was killed"
    assert failed_claims(check_apps([request("sdk-1")], [error], [kill], 0)) == [claim] * is_found


def test_an_error_long_after_a_kill_is_found() -> None:
    error = AppError("sdk", 110.0, 111.0, "503")
    assert failed_claims(check_apps([request("sdk-1")], [error], [PROXY], 0)) != []


def test_a_request_with_no_group_or_with_two_is_found() -> None:
    sent = request("sdk-1", 10.0, 11.0)
    one, again, gone = group("sdk-1"), group("sdk-1"), group("sdk-1", "failed")
    assert failed_claims(check_one_group_each([one, gone], [sent], [PROXY])) == []
    assert failed_claims(check_one_group_each([gone], [sent], [PROXY])) == [
        "every answered request has a group"
    ]
    assert failed_claims(check_one_group_each([one, again], [sent], [PROXY])) == [
        "no request has two groups"
    ]


def test_a_request_with_two_groups_across_a_kill_of_the_proxy_is_counted() -> None:
    findings = check_one_group_each(
        [group("cuts-1")] * 2, [request("cuts-1", 99.0, 104.0)], [PROXY]
    )
    assert failed_claims(findings) == []
    assert findings[-1].figures == "0 and 1 ['cuts-1']"


def test_few_second_groups_may_come_from_connections_cut_after_the_answer() -> None:
    two_groups = [group("cuts-1", status=200)] * 2
    often = ClientRequest("cuts-1", "cuts", 1.0, 2.0, num_cut=100)
    assert failed_claims(check_one_group_each(two_groups, [often], [])) == []
    once = ClientRequest("cuts-1", "cuts", 1.0, 2.0, num_cut=1)
    assert len(failed_claims(check_one_group_each(two_groups, [once], []))) == 1


def test_equal_requests_of_opencode_are_found() -> None:
    body = group("a", request_json="Working directory: /w1")
    assert check_coding([body, group("b", request_json="Working directory: /w2")]).holds
    assert check_coding([body, body]).holds is False


def test_a_line_without_a_condition_is_marked_as_information() -> None:
    explained = check_apps([request("sdk-1")], [AppError("sdk", 99.0, 102.0, "503")], [PROXY], 0)[
        -1
    ]
    reasons = check_states([group("a")])[-1]
    not_measured = [check_coding([]), *check_memory([])]
    assert [one.mark for one in (explained, reasons, *not_measured)] == ["info"] * 5


def test_a_side_call_that_was_trained_is_found() -> None:
    assert check_side_calls([group("side-1", "served", "side_call: marker")]).holds
    assert check_side_calls([group("side-1")]).holds is False


def test_groups_that_still_wait_or_were_lost_are_found() -> None:
    assert failed_claims(check_states([group("a"), group("b", "dropped", "stale")])) == []
    waiting = "no group is left scored or pooled"
    assert failed_claims(check_states([group("a", "scored")])) == [waiting]
    assert failed_claims(check_states([group("a", "pooled")])) == [waiting]
    assert failed_claims(check_states([], [group("feedback:a/b", "pooled")])) == [waiting]
    assert failed_claims(check_states([], [group("feedback:a/b", "received")])) == [waiting]
    for reason in ("swarm_refused: 400", "server_crashed", "swarm_unreachable"):
        assert failed_claims(check_states([group("a", "lost", reason)])) == ["no group was lost"]


def step(number: int, *names: str) -> Json:
    return {"kind": "step", "step": number, "groups": [{"group_id": name} for name in names]}


def test_a_group_that_was_trained_twice_is_found() -> None:
    groups = [group("a"), group("b")]
    assert failed_claims(check_trained_once([step(1, "a"), step(2, "b")], groups)) == []
    twice = check_trained_once([step(1, "a"), step(2, "a", "b")], groups)
    assert failed_claims(twice) == ["no group was trained twice"]


def test_a_step_that_a_kill_undid_counts_once_it_is_taken_again() -> None:
    entries = [step(1, "a"), step(2, "b"), {"kind": "restored", "step": 1}]
    disagree = ["ledger and server agree on what was trained"]
    assert failed_claims(check_trained_once(entries, [group("a"), group("b")])) == disagree
    again = [*entries, step(2, "b")]
    assert failed_claims(check_trained_once(again, [group("a"), group("b")])) == []


def memory(name: str, growth: float) -> list[MemoryReading]:
    """Return readings of ten minutes for the proxy. For the server, return readings of three
    starts, ten minutes after each start."""
    return [
        MemoryReading(
            name, 600.0 * start + age, start, age, 100 + growth * (600 * start + age) / 1800
        )
        for start in range(3 if name == "server" else 1)
        for age in range(0, 600, 5)
    ]


@pytest.mark.parametrize(("proxy", "server"), [(0, 0), (200, 0), (0, 60)])
def test_memory_that_grows_is_found(proxy: float, server: float) -> None:
    findings = check_memory([*memory("proxy", proxy), *memory("server", server)])
    assert [not finding.holds for finding in findings] == [proxy > 0, server > 0]
