"""Titles, tags and summaries, and agents below agents."""

from __future__ import annotations

import pytest

from fakevllm.sessions.hints import Hints
from fakevllm.sessions.types import Evidence, Kind
from tests.proxy.sessions.talks import NAMED, Talk, assistant, call, opened, tool, user


@pytest.mark.parametrize("is_first", [True, False])
def test_a_title_takes_no_turn(is_first: bool) -> None:
    talk = Talk()
    title = [user("Generate a title for this conversation:\n"), user("hello there")]
    asked = ([(title, True)] if is_first else []) + [([user("hello there")], False)]
    if not is_first:
        asked.append((title, True))
    groups = [talk.ask(messages, NAMED, is_side=is_side) for messages, is_side in asked]
    side = next(place for _, place in groups if place.kind is Kind.SIDE)
    main = next(place for _, place in groups if place.kind is not Kind.SIDE)
    assert (main.kind, main.turn, side.turn) == (Kind.NEW, 1, 1)
    assert side.session_id == main.session_id
    for group, _ in groups:
        talk.answer(group, "Hi!")
    _, after = talk.ask([user("hello there"), assistant("Hi!"), user("go on")], NAMED)
    assert (after.turn, after.kind) == (2, Kind.CONTINUES)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_title_without_a_name_belongs_to_the_question_it_quotes(is_first: bool) -> None:
    talk = Talk()
    title = [user("Generate a title:\n"), user("what is 2+2?")]
    opened(talk)
    both = [(title, True), ([user("what is 2+2?")], False)]
    both = both if is_first else both[::-1]
    places = [talk.ask(messages, is_side=is_side)[1] for messages, is_side in both]
    side, main = places if is_first else places[::-1]
    assert side.session_id == main.session_id
    assert (main.kind, main.turn, side.turn) == (Kind.NEW, 1, 1)


def test_a_sub_agent_has_a_session_of_its_own_below_the_call_that_started_it() -> None:
    talk = Talk()
    first, main = talk.turn([user("do it")], assistant(None, call("call_1", name="task")), NAMED)
    agent = Hints(session="ses_2", parent="ses_1", is_header=True)
    second, place = talk.turn([user("look for it")], "Found.", agent)
    assert (place.kind, place.turn, place.parent_id) == (Kind.SUB_AGENT, 1, first)
    assert place.parent_session_id == main.session_id != place.session_id
    _, after = talk.ask([user("look for it"), assistant("Found."), user("more")], agent)
    assert (after.kind, after.parent_id, after.turn) == (Kind.CONTINUES, second, 2)
    _, back = talk.ask(
        [user("do it"), assistant(None, call("call_1", name="task")), tool("call_1", "Found.")],
        NAMED,
    )
    assert (back.parent_id, back.turn, back.kind) == (first, 1, Kind.CONTINUES)


def test_equal_questions_of_two_sessions_are_distinguished_by_the_quoted_answer() -> None:
    talk = Talk()
    places = {answer: talk.turn([user("hello there")], answer)[1] for answer in ("Hi!", "Hey!")}
    for answer, place in places.items():
        chat = f"### Task:\nTags, please.\nUSER: hello there\nASSISTANT: {answer}\n</chat>"
        _, side = talk.ask([user(chat)], is_side=True)
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
def test_a_quote_is_of_whole_lines_or_of_a_long_beginning(
    question: str, quoted: str, is_found: bool
) -> None:
    talk = Talk()
    _, place = talk.turn([user(question)], "Yes.")
    _, side = talk.ask([user("Generate a title:"), user(quoted)], is_side=True)
    assert (side.session_id == place.session_id) is is_found


def test_a_title_waits_for_one_question_of_its_words_and_not_for_long() -> None:
    talk = Talk()
    title = [user("Generate a title:\n"), user("hello there")]
    _, first = talk.ask(title, is_side=True)
    _, unlike = talk.ask([user("what is 2+2?")])
    _, asked = talk.ask([user("hello there")])
    _, twin = talk.ask([user("hello there")])
    assert asked.session_id == first.session_id
    assert len({one.session_id for one in (unlike, asked, twin)}) == 3
    late, second = Talk(), title
    _, side = late.ask(second, is_side=True)
    late.now += 100
    assert late.ask([user("hello there")])[1].session_id != side.session_id


def test_a_sub_agents_parent_is_a_main_call_and_not_a_title() -> None:
    talk = Talk()
    _, _, group = opened(talk, NAMED)
    talk.turn([user("Generate a title:\n"), user("hello there")], "Hello", NAMED, is_side=True)
    agent = Hints(session="ses_2", parent="ses_1", is_header=True)
    assert talk.ask([user("look")], agent)[1].parent_id == group


def test_a_side_call_is_no_way_on_from_an_answer() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    asked = [*history, user("and now?")]
    talk.turn(asked, "Nothing.", is_side=True)
    for messages in (asked, [*history, user("go on")]):
        failed, place = talk.ask(messages)
        assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
        assert place.kind is Kind.CONTINUES
        talk.fail(failed)


def test_a_title_may_quote_the_first_question_at_any_time() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    talk.turn([*history, user("and now?")], "Nothing.")
    _, side = talk.ask([user("Generate a title:"), user("hello there")], is_side=True)
    assert (side.session_id, side.turn) == (session, 2)


def test_a_quote_of_a_question_of_two_sessions_belongs_to_the_latest_one() -> None:
    talk = Talk()
    first = talk.turn([user("hello there")], "Hi!")[1].session_id
    talk.turn([user("hello there")], "Hey!")
    title = [user("Generate a title:"), user("hello there")]
    assert talk.ask(title, is_side=True)[1].session_id != first
    talk.turn([user("hello there"), assistant("Hi!"), user("go on")], "Well.")
    assert talk.ask(title, is_side=True)[1].session_id == first


def test_a_quote_says_nothing_of_another_keys_sessions() -> None:
    talk = Talk()
    _, session, _ = opened(talk)
    title = [user("Generate a title:\n"), user("hello there")]
    _, place = talk.ask(title, is_side=True, scope="other")
    assert place.session_id != session
    _, waiting = talk.ask([user("hello there")])
    assert waiting.session_id not in (session, place.session_id)
