"""What benchmarks.mixed_traffic must not overlook."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.mixed_checks import (
    Finding,
    Kill,
    Weight,
    check_apps,
    check_coding,
    check_memory,
    check_one_group_each,
    check_side_calls,
    check_states,
    check_trained_once,
)
from benchmarks.mixed_clients import Asked, Trouble, trouble_in

Json = dict[str, Any]

PROXY = Kill("proxy", 100.0, 3.0)
SERVER = Kill("server", 100.0, 10.0)


def group(name: str, state: str = "trained", reason: str | None = None, **more: Any) -> Json:
    row = {"group_id": name, "question": f"What is {name} plus 3?", "state": state}
    return row | {"reason": reason, "status": 499, "num_resent": 0, "request_json": "{}"} | more


def failed(findings: list[Finding]) -> list[str]:
    return [one.what for one in findings if one.is_good is False]


def asked(name: str, began: float = 0.0, ended: float | None = 1.0) -> Asked:
    return Asked(name, name.partition("-")[0], began, ended)


def test_a_request_without_an_answer_is_told() -> None:
    fine, never = asked("sdk-1"), asked("sdk-2", ended=None)
    assert failed(check_apps([], [], [], 0)) == ["every request was answered in the end"]
    assert failed(check_apps([fine], [], [], 0)) == []
    assert failed(check_apps([fine, never], [], [], 0)) == ["every request was answered in the end"]


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
def test_an_error_behind_status_200_is_no_answer(
    path: str, content: bytes, is_streamed: bool
) -> None:
    assert trouble_in(path, content, is_streamed) is not None


@pytest.mark.parametrize(
    ("path", "content", "is_streamed"),
    [
        (CHAT, b'   {"choices": [{"message": {"content": "7"}}]}', False),
        (RESPONSES, b'{"status": "completed", "error": null}', False),
        (CHAT, b'data: {"choices": [{"delta": {"content": "7"}}]}\n\ndata: [DONE]\n\n', True),
        (RESPONSES, b"event: response.completed\ndata: {}\n\n", True),
    ],
)
def test_a_whole_answer_is_one(path: str, content: bytes, is_streamed: bool) -> None:
    assert trouble_in(path, content, is_streamed) is None


@pytest.mark.parametrize(("kill", "is_told"), [(PROXY, False), (SERVER, True)])
def test_an_error_is_the_fault_of_a_killed_proxy_and_of_no_killed_server(
    kill: Kill, is_told: bool
) -> None:
    trouble = Trouble("sdk", 99.0, 102.0, "503")
    blame = "no error reached an app while only the server was killed"
    assert failed(check_apps([asked("sdk-1")], [trouble], [kill], 0)) == [blame] * is_told


def test_an_error_long_after_a_kill_is_told() -> None:
    trouble = Trouble("sdk", 110.0, 111.0, "503")
    assert failed(check_apps([asked("sdk-1")], [trouble], [PROXY], 0)) != []


def test_a_request_with_no_group_or_with_two_is_told() -> None:
    request = asked("sdk-1", 10.0, 11.0)
    one, again, gone = group("sdk-1"), group("sdk-1"), group("sdk-1", "failed")
    assert failed(check_one_group_each([one, gone], [request], [PROXY])) == []
    assert failed(check_one_group_each([gone], [request], [PROXY])) == [
        "every answered request has a group"
    ]
    assert failed(check_one_group_each([one, again], [request], [PROXY])) == ["none has two"]


def test_a_request_with_two_groups_across_a_kill_of_the_proxy_is_counted() -> None:
    found = check_one_group_each([group("cuts-1")] * 2, [asked("cuts-1", 99.0, 104.0)], [PROXY])
    assert failed(found) == []
    assert found[-1].told == "0 and 1 ['cuts-1']"


def test_few_may_be_cut_when_their_answer_is_out() -> None:
    told = [group("cuts-1", status=200)] * 2
    often = Asked("cuts-1", "cuts", 1.0, 2.0, num_cut=100)
    assert failed(check_one_group_each(told, [often], [])) == []
    once = Asked("cuts-1", "cuts", 1.0, 2.0, num_cut=1)
    assert len(failed(check_one_group_each(told, [once], []))) == 1


def test_equal_requests_of_opencode_are_told() -> None:
    body = group("a", request_json="Working directory: /w1")
    assert check_coding([body, group("b", request_json="Working directory: /w2")]).is_good
    assert check_coding([body, body]).is_good is False


def test_what_cannot_fail_is_told_and_not_called_good() -> None:
    blamed = check_apps([asked("sdk-1")], [Trouble("sdk", 99.0, 102.0, "503")], [PROXY], 0)[-1]
    why = check_states([group("a")])[-1]
    nothing_measured = [check_coding([]), *check_memory([])]
    assert [one.mark for one in (blamed, why, *nothing_measured)] == ["told"] * 5


def test_a_side_call_that_was_trained_is_told() -> None:
    assert check_side_calls([group("side-1", "served", "side_call: marker")]).is_good
    assert check_side_calls([group("side-1")]).is_good is False


def test_groups_that_wait_for_ever_or_were_lost_are_told() -> None:
    assert failed(check_states([group("a"), group("b", "dropped", "stale")])) == []
    waiting = "no group is left scored or pooled"
    assert failed(check_states([group("a", "scored")])) == [waiting]
    assert failed(check_states([group("a", "pooled")])) == [waiting]
    assert failed(check_states([], [group("feedback:a/b", "pooled")])) == [waiting]
    assert failed(check_states([], [group("feedback:a/b", "received")])) == [waiting]
    for reason in ("swarm_refused: 400", "server_crashed", "swarm_unreachable"):
        assert failed(check_states([group("a", "lost", reason)])) == ["no group was lost"]


def step(number: int, *names: str) -> Json:
    return {"kind": "step", "step": number, "groups": [{"group_id": name} for name in names]}


def test_a_group_that_was_trained_twice_is_told() -> None:
    groups = [group("a"), group("b")]
    assert failed(check_trained_once([step(1, "a"), step(2, "b")], groups)) == []
    twice = check_trained_once([step(1, "a"), step(2, "a", "b")], groups)
    assert failed(twice) == ["no group was trained twice"]


def test_a_step_that_a_kill_undid_counts_when_it_is_made_again() -> None:
    entries = [step(1, "a"), step(2, "b"), {"kind": "restored", "step": 1}]
    apart = ["ledger and server agree on what was trained"]
    assert failed(check_trained_once(entries, [group("a"), group("b")])) == apart
    again = [*entries, step(2, "b")]
    assert failed(check_trained_once(again, [group("a"), group("b")])) == []


def weights(name: str, growth: float) -> list[Weight]:
    """A life of ten minutes, and of the server three of them."""
    return [
        Weight(name, 600.0 * life + age, life, age, 100 + growth * (600 * life + age) / 1800)
        for life in range(3 if name == "server" else 1)
        for age in range(0, 600, 5)
    ]


@pytest.mark.parametrize(("proxy", "server"), [(0, 0), (200, 0), (0, 60)])
def test_memory_that_grows_is_told(proxy: float, server: float) -> None:
    found = check_memory([*weights("proxy", proxy), *weights("server", server)])
    assert [not one.is_good for one in found] == [proxy > 0, server > 0]
