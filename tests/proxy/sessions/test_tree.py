"""Sessions, turns and parents, told from what apps repeat."""

from __future__ import annotations

from dataclasses import replace

from fakevllm.sessions.types import Evidence, Kind
from tests.proxy.sessions.talks import LONG, NAMED, Talk, assistant, call, opened, tool, user


def test_the_next_message_is_the_next_turn_of_the_session() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    _, place = talk.ask([*history, user("and now?")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert (place.kind, place.evidence) == (Kind.CONTINUES, Evidence.PREFIX)


def test_a_tools_result_stays_in_the_turn() -> None:
    talk = Talk()
    asked = [user("read it")]
    calls = assistant(None, call("call_1", '{"path": "a"}'))
    first, _ = talk.turn(asked, calls)
    again = assistant("", call("call_1", '{"path":"a"}'))
    _, place = talk.ask([*asked, again, tool("call_1", "text")])
    assert (place.parent_id, place.turn, place.kind) == (first, 1, Kind.CONTINUES)
    assert place.evidence is Evidence.TOOL_CALL_ID


def test_two_users_with_equal_first_requests_have_two_sessions() -> None:
    talk = Talk()
    history, one, _ = opened(talk)
    other_history, two, other = opened(talk)
    assert one != two and history == other_history
    _, first = talk.turn([*history, user("go on")], "Sure.")
    _, second = talk.turn([*history, user("go on")], "Sure!")
    assert {first.session_id, second.session_id} == {one, two}
    assert first.turn == second.turn == 2
    assert other in (first.parent_id, second.parent_id)


def test_a_regenerated_answer_is_a_branch_of_the_same_turn() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    asked = [*history, user("a joke")]
    talk.turn(asked, "A bad one.")
    better, place = talk.turn(asked, "A good one.")
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.REGENERATES
    _, after = talk.ask([*asked, assistant("A good one."), user("ha")])
    assert (after.parent_id, after.turn, after.kind) == (better, 3, Kind.CONTINUES)


def test_a_repeated_first_request_is_a_new_session_unless_it_names_one() -> None:
    talk = Talk()
    opened(talk)
    _, place = talk.turn([user("hello there")], "Hey!")
    assert place.kind is Kind.NEW
    opened(talk, NAMED)
    _, named = talk.ask([user("hello there")], NAMED)
    assert (named.kind, named.turn, named.evidence) == (Kind.REGENERATES, 1, Evidence.HEADER)


def test_an_edited_message_is_a_branch_from_the_answer_before_it() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    talk.turn([*history, user("a joke")], "Ha.")
    _, place = talk.ask([*history, user("a poem")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.EDITS


def test_an_edited_opening_is_known_by_the_sessions_name() -> None:
    talk = Talk()
    _, session, _ = opened(talk, NAMED)
    _, place = talk.ask([user("hello here")], NAMED)
    assert (place.session_id, place.turn, place.kind) == (session, 1, Kind.EDITS)


def test_a_shortened_history_stays_in_the_session_that_is_named() -> None:
    talk = Talk()
    history, session, _ = opened(talk, NAMED)
    talk.turn([*history, user("more")], "More.", NAMED)
    _, place = talk.ask([user("We did it all."), assistant("Yes."), user("and now?")], NAMED)
    assert (place.session_id, place.turn, place.kind) == (session, 3, Kind.COMPACTED)
    assert place.parent_id is None


def test_a_summary_that_we_gave_tells_the_session() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    summary, side = talk.turn([*history, user("Summarise")], LONG, is_side=True)
    assert (side.session_id, side.turn) == (session, 1)
    told = [user("What did we do so far?"), assistant(LONG), user("and now?")]
    _, place = talk.ask(told)
    assert (place.session_id, place.parent_id, place.turn) == (session, summary, 2)
    assert (place.kind, place.evidence) == (Kind.COMPACTED, Evidence.ANSWER)


def test_a_named_session_continues_from_its_summary() -> None:
    talk = Talk()
    history, session, _ = opened(talk, NAMED)
    summary, _ = talk.turn([*history, user("Summarise")], LONG, NAMED, is_side=True)
    told = [user("What did we do so far?"), assistant(LONG), user("and now?")]
    _, place = talk.ask(told, NAMED)
    assert (place.session_id, place.parent_id, place.turn) == (session, summary, 2)
    assert (place.kind, place.evidence) == (Kind.COMPACTED, Evidence.HEADER)


def test_another_opening_beside_an_open_one_is_parallel() -> None:
    talk = Talk()
    _, first = talk.ask([user("hello there")], NAMED)
    _, second = talk.ask([user("hello here")], NAMED)
    assert (second.session_id, second.turn, second.kind) == (first.session_id, 1, Kind.PARALLEL)


def test_a_request_beside_one_that_is_not_answered_is_parallel() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    talk.ask([*history, user("this way")])
    _, place = talk.ask([*history, user("that way")])
    assert (place.session_id, place.turn, place.kind) == (session, 2, Kind.PARALLEL)


def test_a_prompt_continues_the_prompt_and_answer_that_it_begins_with() -> None:
    talk = Talk()
    talk.turn("User: hi\nBot:", " Hello")
    group, place = talk.turn("User: hello\nBot:", " Hey there \n")
    prompt = "User: hello\nBot: Hey there\nUser: and now?\nBot:"
    second, after = talk.turn(prompt, " Now what?")
    assert (after.session_id, after.parent_id, after.turn) == (place.session_id, group, 2)
    _, again = talk.ask(prompt)
    assert (again.kind, again.turn, again.parent_id) == (Kind.REGENERATES, 2, group)
    _, third = talk.ask(f"{prompt} Now what?\nUser: bye\nBot:")
    assert (third.parent_id, third.turn) == (second, 3)
    _, other = talk.ask("User: hello\nBot: Hi there\nBot:")
    assert other.kind is Kind.NEW


def test_a_text_to_be_completed_continues_its_session() -> None:
    talk = Talk()
    group, _ = talk.turn("Once upon", " a time")
    _, place = talk.ask("Once upon a time")
    assert (place.parent_id, place.turn, place.kind) == (group, 2, Kind.CONTINUES)


def test_a_fork_is_a_new_session_that_continues_the_other_sessions_answer() -> None:
    talk = Talk()
    history, session, group = opened(talk, NAMED)
    forked = replace(NAMED, session="ses_2")
    _, place = talk.ask([*history, user("go on")], forked)
    assert place.session_id != session
    assert (place.parent_id, place.turn, place.kind) == (group, 2, Kind.NEW)


def test_a_window_that_slides_over_the_history_stays_in_the_session() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    group, _ = talk.turn([*history, user("more")], LONG)
    _, place = talk.ask([user("more"), assistant(LONG), user("go on")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)


def test_an_empty_answer_is_gone_on_from_too() -> None:
    talk = Talk()
    group, first = talk.turn([user("say nothing")], "")
    _, place = talk.ask([user("say nothing"), assistant(""), user("well?")])
    assert (place.session_id, place.parent_id) == (first.session_id, group)
    _, again = talk.ask([user("say nothing")])
    assert again.kind is Kind.NEW
