"""Sessions, turns and parents of requests, found from the histories that apps repeat."""

from __future__ import annotations

from dataclasses import replace

from fakevllm.sessions.types import Evidence, Kind
from tests.proxy.sessions.session_client import (
    LONG,
    NAMED,
    SessionClient,
    assistant,
    call,
    open_session,
    tool,
    user,
)


def test_the_next_message_is_the_next_turn_of_the_session() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    _, place = client.request([*history, user("and now?")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert (place.kind, place.evidence) == (Kind.CONTINUES, Evidence.PREFIX)


def test_a_tools_result_stays_in_the_turn() -> None:
    client = SessionClient()
    request = [user("read it")]
    calls = assistant(None, call("call_1", '{"path": "a"}'))
    first, _ = client.turn(request, calls)
    again = assistant("", call("call_1", '{"path":"a"}'))
    _, place = client.request([*request, again, tool("call_1", "text")])
    assert (place.parent_id, place.turn, place.kind) == (first, 1, Kind.CONTINUES)
    assert place.evidence is Evidence.TOOL_CALL_ID


def test_two_users_with_equal_first_requests_have_two_sessions() -> None:
    client = SessionClient()
    history, one, _ = open_session(client)
    other_history, two, other = open_session(client)
    assert one != two and history == other_history
    _, first = client.turn([*history, user("go on")], "Sure.")
    _, second = client.turn([*history, user("go on")], "Sure!")
    assert {first.session_id, second.session_id} == {one, two}
    assert first.turn == second.turn == 2
    assert other in (first.parent_id, second.parent_id)


def test_a_regenerated_answer_is_a_branch_of_the_same_turn() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    request = [*history, user("a joke")]
    client.turn(request, "A bad one.")
    better, place = client.turn(request, "A good one.")
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.REGENERATES
    _, after = client.request([*request, assistant("A good one."), user("ha")])
    assert (after.parent_id, after.turn, after.kind) == (better, 3, Kind.CONTINUES)


def test_a_repeated_first_request_is_a_new_session_unless_it_names_one() -> None:
    client = SessionClient()
    open_session(client)
    _, place = client.turn([user("hello there")], "Hey!")
    assert place.kind is Kind.NEW
    open_session(client, NAMED)
    _, named = client.request([user("hello there")], NAMED)
    assert (named.kind, named.turn, named.evidence) == (Kind.REGENERATES, 1, Evidence.HEADER)


def test_an_edited_message_is_a_branch_from_the_answer_before_it() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    client.turn([*history, user("a joke")], "Ha.")
    _, place = client.request([*history, user("a poem")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.EDITS


def test_an_edited_opening_is_found_by_the_session_name() -> None:
    client = SessionClient()
    _, session, _ = open_session(client, NAMED)
    _, place = client.request([user("hello here")], NAMED)
    assert (place.session_id, place.turn, place.kind) == (session, 1, Kind.EDITS)


def test_a_shortened_history_stays_in_the_named_session() -> None:
    client = SessionClient()
    history, session, _ = open_session(client, NAMED)
    client.turn([*history, user("more")], "More.", NAMED)
    _, place = client.request([user("We did it all."), assistant("Yes."), user("and now?")], NAMED)
    assert (place.session_id, place.turn, place.kind) == (session, 3, Kind.COMPACTED)
    assert place.parent_id is None


def test_a_summary_that_was_served_identifies_the_session() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    summary, side = client.turn([*history, user("Summarise")], LONG, is_side=True)
    assert (side.session_id, side.turn) == (session, 1)
    messages = [user("What did we do so far?"), assistant(LONG), user("and now?")]
    _, place = client.request(messages)
    assert (place.session_id, place.parent_id, place.turn) == (session, summary, 2)
    assert (place.kind, place.evidence) == (Kind.COMPACTED, Evidence.ANSWER)


def test_a_named_session_continues_from_its_summary() -> None:
    client = SessionClient()
    history, session, _ = open_session(client, NAMED)
    summary, _ = client.turn([*history, user("Summarise")], LONG, NAMED, is_side=True)
    messages = [user("What did we do so far?"), assistant(LONG), user("and now?")]
    _, place = client.request(messages, NAMED)
    assert (place.session_id, place.parent_id, place.turn) == (session, summary, 2)
    assert (place.kind, place.evidence) == (Kind.COMPACTED, Evidence.HEADER)


def test_another_opening_during_an_unanswered_one_is_parallel() -> None:
    client = SessionClient()
    _, first = client.request([user("hello there")], NAMED)
    _, second = client.request([user("hello here")], NAMED)
    assert (second.session_id, second.turn, second.kind) == (first.session_id, 1, Kind.PARALLEL)


def test_a_request_during_an_unanswered_one_is_parallel() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    client.request([*history, user("this way")])
    _, place = client.request([*history, user("that way")])
    assert (place.session_id, place.turn, place.kind) == (session, 2, Kind.PARALLEL)


def test_a_prompt_continues_the_prompt_and_answer_that_it_begins_with() -> None:
    client = SessionClient()
    client.turn("User: hi\nBot:", " Hello")
    group, place = client.turn("User: hello\nBot:", " Hey there \n")
    prompt = "User: hello\nBot: Hey there\nUser: and now?\nBot:"
    second, after = client.turn(prompt, " Now what?")
    assert (after.session_id, after.parent_id, after.turn) == (place.session_id, group, 2)
    _, again = client.request(prompt)
    assert (again.kind, again.turn, again.parent_id) == (Kind.REGENERATES, 2, group)
    _, third = client.request(f"{prompt} Now what?\nUser: bye\nBot:")
    assert (third.parent_id, third.turn) == (second, 3)
    _, other = client.request("User: hello\nBot: Hi there\nBot:")
    assert other.kind is Kind.NEW


def test_a_completion_of_a_longer_text_continues_its_session() -> None:
    client = SessionClient()
    group, _ = client.turn("Once upon", " a time")
    _, place = client.request("Once upon a time")
    assert (place.parent_id, place.turn, place.kind) == (group, 2, Kind.CONTINUES)


def test_a_fork_is_a_new_session_that_continues_the_other_sessions_answer() -> None:
    client = SessionClient()
    history, session, group = open_session(client, NAMED)
    forked = replace(NAMED, session="ses_2")
    _, place = client.request([*history, user("go on")], forked)
    assert place.session_id != session
    assert (place.parent_id, place.turn, place.kind) == (group, 2, Kind.NEW)


def test_a_truncated_history_stays_in_its_session() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    group, _ = client.turn([*history, user("more")], LONG)
    _, place = client.request([user("more"), assistant(LONG), user("go on")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)


def test_an_empty_answer_can_be_continued() -> None:
    client = SessionClient()
    group, first = client.turn([user("say nothing")], "")
    _, place = client.request([user("say nothing"), assistant(""), user("well?")])
    assert (place.session_id, place.parent_id) == (first.session_id, group)
    _, again = client.request([user("say nothing")])
    assert again.kind is Kind.NEW
