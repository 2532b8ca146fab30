"""Reads of sessions from the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.session_reads import FollowUp
from fakevllm.ledger.store import Ledger
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import Evidence, Kind, Place
from tests.proxy.ledger.ledger_cases import group, sibling
from tests.proxy.sessions.session_client import SessionClient, assistant, call, tool, user


def placed(
    group_id: str,
    session_id: str = "s1",
    parent_id: str | None = None,
    *,
    turn: int = 1,
    kind: str = "continues",
    at: float = 1000.0,
    rewards: Sequence[float | None] = (0.0, 1.0),
    key: str = "",
    parent_session_id: str | None = None,
    question: str = "1+1?",
) -> GroupRecord:
    return replace(
        group(group_id, rewards, received_at=at),
        session_id=session_id,
        parent_session_id=parent_session_id,
        parent_id=parent_id,
        turn=turn,
        kind=kind,
        evidence="prefix",
        asked_key=key or group_id.encode().hex(),
        question=question,
    )


def put(ledger: Ledger, *records: GroupRecord) -> None:
    for record in records:
        ledger.record(record)
    assert ledger.drain()


def test_sessions_are_listed_by_their_latest_request(ledger: Ledger) -> None:
    put(
        ledger,
        placed("t", kind="side", at=999.0, rewards=(None,), question="Generate a title"),
        placed("a", kind="new", question="first"),
        placed("b", parent_id="a", turn=2, at=1005.0, rewards=(0.5, 1.0), question="second"),
        placed("c", "s2", at=1003.0, kind="new", rewards=(None, None), parent_session_id="s1"),
        group("unplaced"),
    )
    first, second = ledger.sessions.latest(10)
    assert (first.session_id, first.turns, first.num_groups, first.seen_at) == ("s1", 2, 3, 1005.0)
    assert (first.reward, first.question, first.app_key) == (0.25, "first", "0a1b2c3d")
    assert (second.session_id, second.reward, second.parent_session_id) == ("s2", None, "s1")
    assert [row.session_id for row in ledger.sessions.latest(1)] == ["s1"]


def test_a_sessions_groups_have_the_reward_of_the_served_sibling(ledger: Ledger) -> None:
    put(ledger, placed("b", parent_id="a", turn=2, at=1001.0), placed("a"), placed("c", "s2"))
    groups = ledger.sessions.groups("s1")
    assert [(one.group_id, one.parent_id, one.turn) for one in groups] == [
        ("a", None, 1),
        ("b", "a", 2),
    ]
    assert [one.reward for one in groups] == [0.0, 0.0]  # sibling 0 is the served one


def test_a_session_is_found_by_the_beginning_of_its_id(ledger: Ledger) -> None:
    put(ledger, *(placed(str(n), name) for n, name in enumerate(["abc", "abd", "b", "abc"])))
    assert ledger.sessions.ids_with_prefix("abc") == ["abc"]
    assert ledger.sessions.ids_with_prefix("ab") == ["abc", "abd"]
    assert ledger.sessions.ids_with_prefix("c") == []


def test_the_sessions_that_a_session_started_are_listed(ledger: Ledger) -> None:
    put(
        ledger,
        placed("a"),
        placed("x", "s2", "a", kind="sub_agent", parent_session_id="s1", at=1001.0),
        placed("y", "s2", "x", parent_session_id="s1", at=1002.0),
    )
    started = ledger.sessions.children("s1")
    assert [session for session, _ in started] == ["s2"]


def test_the_requests_that_followed_an_answer_are_listed(ledger: Ledger) -> None:
    put(
        ledger,
        placed("a"),
        placed("b", parent_id="a", turn=2, key="b0", at=1001.0),
        placed("again", parent_id="a", turn=2, key="b0", at=1002.0, kind="regenerates"),
        placed("c", parent_id="b", turn=2, at=1003.0, question="tools"),
        placed("d", parent_id="b", turn=3, at=1004.0, question="thanks"),
        placed("s", parent_id="b", turn=2, at=1005.0, kind="side"),
        placed("other", "s2", key="b0", at=1006.0, kind="regenerates"),
    )
    assert ledger.sessions.follow_ups("b") == [
        FollowUp("again", "regenerates", False, "1+1?", 1002.0),
        FollowUp("c", "continues", False, "tools", 1003.0),
        FollowUp("d", "continues", True, "thanks", 1004.0),
    ]
    assert ledger.sessions.follow_ups("again") == []
    assert ledger.sessions.follow_ups("unknown") == []


def test_restored_requests_are_the_latest_and_sorted_oldest_first(ledger: Ledger) -> None:
    put(ledger, *(placed(f"g{n}", at=1000.0 + n) for n in range(5)), group("unplaced"))
    kept = ledger.sessions.latest_requests(3)
    assert [one.group_id for one in kept] == ["g2", "g3", "g4"]
    assert kept[0].scope == "0a1b2c3d"
    assert kept[0].message_json == '{"role":"assistant","content":"answer 0"}'
    assert kept[0].place == Place(
        session_id="s1",
        parent_id=None,
        turn=1,
        kind=Kind.CONTINUES,
        evidence=Evidence.PREFIX,
        asked_key=b"g2".hex(),
    )


def test_a_tree_restored_from_the_ledger_places_requests_as_before(ledger: Ledger) -> None:
    client = SessionClient()
    request = [user("read it")]
    calls = assistant(None, call("call_1", '{"path": "a"}'))
    first, one = client.turn(request, calls, scope="0a1b2c3d")
    history = [*request, calls, tool("call_1", "text")]
    second, two = client.turn(history, "Done.", scope="0a1b2c3d")
    failed, three = client.request([*history, assistant("Done."), user("and?")], scope="0a1b2c3d")
    messages = {first: calls, second: assistant("Done."), failed: None}
    for place, (group_id, message) in zip((one, two, three), messages.items(), strict=True):
        record = placed(
            group_id,
            place.session_id,
            place.parent_id,
            turn=place.turn,
            kind=place.kind,
            key=place.asked_key,
            at=1000.0 + place.turn,
        )
        text = None if message is None else orjson.dumps(message).decode()
        rows = [replace(sibling(0, served=text is not None), message_json=text)]
        put(ledger, replace(record, siblings=rows))
    client.tree = SessionTree()
    placed_requests = ledger.sessions.latest_requests(100)
    client.tree.restore(placed_requests, now=client.now, unix_now=2000.0)
    messages = [*history, assistant("Done."), user("and?")]
    _, again = client.turn(messages, "Well.", scope="0a1b2c3d")
    assert (again.session_id, again.parent_id, again.turn) == (one.session_id, second, 2)
    assert again.kind is Kind.REPEATS
    lost = [user("cut off"), assistant("", call("call_1")), tool("call_1", "x")]
    _, by_id = client.request(lost, scope="0a1b2c3d")
    assert (by_id.session_id, by_id.parent_id) == (one.session_id, first)
