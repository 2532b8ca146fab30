"""Sessions of side calls (titles, tags, summaries) and of sub-agents."""

from __future__ import annotations

import pytest

from fakevllm.sessions.client_session_ids import Hints
from fakevllm.sessions.types import Evidence, Kind
from tests.proxy.sessions.session_client import (
    NAMED,
    SessionClient,
    assistant,
    call,
    open_session,
    tool,
    user,
)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_title_request_is_not_a_turn(is_first: bool) -> None:
    client = SessionClient()
    title = [user("Generate a title for this conversation:\n"), user("hello there")]
    request = ([(title, True)] if is_first else []) + [([user("hello there")], False)]
    if not is_first:
        request.append((title, True))
    groups = [client.request(messages, NAMED, is_side=is_side) for messages, is_side in request]
    side = next(place for _, place in groups if place.kind is Kind.SIDE)
    main = next(place for _, place in groups if place.kind is not Kind.SIDE)
    assert (main.kind, main.turn, side.turn) == (Kind.NEW, 1, 1)
    assert side.session_id == main.session_id
    for group, _ in groups:
        client.answer(group, "Hi!")
    _, after = client.request([user("hello there"), assistant("Hi!"), user("go on")], NAMED)
    assert (after.turn, after.kind) == (2, Kind.CONTINUES)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_title_request_without_a_session_name_belongs_to_the_quoted_question(
    is_first: bool,
) -> None:
    client = SessionClient()
    title = [user("Generate a title:\n"), user("what is 2+2?")]
    open_session(client)
    both = [(title, True), ([user("what is 2+2?")], False)]
    both = both if is_first else both[::-1]
    places = [client.request(messages, is_side=is_side)[1] for messages, is_side in both]
    side, main = places if is_first else places[::-1]
    assert side.session_id == main.session_id
    assert (main.kind, main.turn, side.turn) == (Kind.NEW, 1, 1)


def test_a_sub_agent_has_its_own_session_below_the_call_that_started_it() -> None:
    client = SessionClient()
    first, main = client.turn([user("do it")], assistant(None, call("call_1", name="task")), NAMED)
    agent = Hints(session="ses_2", parent="ses_1", is_header=True)
    second, place = client.turn([user("look for it")], "Found.", agent)
    assert (place.kind, place.turn, place.parent_id) == (Kind.SUB_AGENT, 1, first)
    assert place.parent_session_id == main.session_id != place.session_id
    _, after = client.request([user("look for it"), assistant("Found."), user("more")], agent)
    assert (after.kind, after.parent_id, after.turn) == (Kind.CONTINUES, second, 2)
    _, back = client.request(
        [user("do it"), assistant(None, call("call_1", name="task")), tool("call_1", "Found.")],
        NAMED,
    )
    assert (back.parent_id, back.turn, back.kind) == (first, 1, Kind.CONTINUES)


def test_equal_questions_of_two_sessions_are_distinguished_by_the_quoted_answer() -> None:
    client = SessionClient()
    places = {answer: client.turn([user("hello there")], answer)[1] for answer in ("Hi!", "Hey!")}
    for answer, place in places.items():
        chat = f"### Task:\nTags, please.\nUSER: hello there\nASSISTANT: {answer}\n</chat>"
        _, side = client.request([user(chat)], is_side=True)
        assert side.session_id == place.session_id and side.evidence is Evidence.QUOTE


@pytest.mark.parametrize(
    ("question", "quoted", "is_found"),
    [
        ("hi", "hiking in Norway", False),
        ("hi", "oh hi", False),
        ("hi", "hi", True),
        ("word " * 100, "word " * 100, True),
        ("word " * 100, "word " * 99 + "more", True),
    ],
)
def test_a_quote_needs_whole_lines_or_a_long_beginning(
    question: str, quoted: str, is_found: bool
) -> None:
    client = SessionClient()
    _, place = client.turn([user(question)], "Yes.")
    _, side = client.request([user("Generate a title:"), user(quoted)], is_side=True)
    assert (side.session_id == place.session_id) is is_found


def test_a_title_request_is_joined_by_one_equal_question_within_a_time_limit() -> None:
    client = SessionClient()
    title = [user("Generate a title:\n"), user("hello there")]
    _, first = client.request(title, is_side=True)
    _, unlike = client.request([user("what is 2+2?")])
    _, request = client.request([user("hello there")])
    _, twin = client.request([user("hello there")])
    assert request.session_id == first.session_id
    assert len({one.session_id for one in (unlike, request, twin)}) == 3
    late, second = SessionClient(), title
    _, side = late.request(second, is_side=True)
    late.now += 100
    assert late.request([user("hello there")])[1].session_id != side.session_id


def test_a_sub_agents_parent_is_a_main_call_and_not_a_title() -> None:
    client = SessionClient()
    _, _, group = open_session(client, NAMED)
    client.turn([user("Generate a title:\n"), user("hello there")], "Hello", NAMED, is_side=True)
    agent = Hints(session="ses_2", parent="ses_1", is_header=True)
    assert client.request([user("look")], agent)[1].parent_id == group


def test_a_side_call_does_not_continue_an_answer() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    request = [*history, user("and now?")]
    client.turn(request, "Nothing.", is_side=True)
    for messages in (request, [*history, user("go on")]):
        failed, place = client.request(messages)
        assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
        assert place.kind is Kind.CONTINUES
        client.fail(failed)


def test_a_title_may_quote_the_first_question_at_any_time() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    client.turn([*history, user("and now?")], "Nothing.")
    _, side = client.request([user("Generate a title:"), user("hello there")], is_side=True)
    assert (side.session_id, side.turn) == (session, 2)


def test_a_quote_of_a_question_of_two_sessions_belongs_to_the_latest_one() -> None:
    client = SessionClient()
    first = client.turn([user("hello there")], "Hi!")[1].session_id
    client.turn([user("hello there")], "Hey!")
    title = [user("Generate a title:"), user("hello there")]
    assert client.request(title, is_side=True)[1].session_id != first
    client.turn([user("hello there"), assistant("Hi!"), user("go on")], "Well.")
    assert client.request(title, is_side=True)[1].session_id == first


def test_a_quote_does_not_find_sessions_of_another_key() -> None:
    client = SessionClient()
    _, session, _ = open_session(client)
    title = [user("Generate a title:\n"), user("hello there")]
    _, place = client.request(title, is_side=True, scope="other")
    assert place.session_id != session
    _, waiting = client.request([user("hello there")])
    assert waiting.session_id not in (session, place.session_id)
