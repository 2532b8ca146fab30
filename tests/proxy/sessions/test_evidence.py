"""What tells a session, and what does not."""

from __future__ import annotations

from dataclasses import replace

from fakevllm.sessions.hints import Hints
from fakevllm.sessions.types import Evidence, Kind, Place
from tests.proxy.sessions.talks import LONG, NAMED, Talk, assistant, call, opened, tool, user


def test_users_that_an_app_names_are_never_one() -> None:
    talk = Talk()
    history, _, _ = opened(talk, Hints(user="ann"))
    _, place = talk.ask([*history, user("go on")], Hints(user="bob"))
    assert (place.kind, place.parent_id) == (Kind.NEW, None)


def test_a_key_finds_nothing_of_another() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    _, place = talk.ask([*history, user("go on")], scope="other")
    assert place.session_id != session and place.parent_id is None
    _, named = talk.ask([user("a")], NAMED)
    _, elsewhere = talk.ask([user("a")], NAMED, scope="other")
    assert named.session_id != elsewhere.session_id


def test_an_answer_that_two_sessions_were_given_tells_neither() -> None:
    talk = Talk()
    for opening in ("one", "two"):
        talk.turn([user(opening)], LONG)
    _, place = talk.ask([user("three"), assistant(LONG), user("and now?")])
    assert (place.kind, place.evidence) == (Kind.NEW, Evidence.NONE)


def test_a_cache_key_of_one_session_tells_it_where_the_history_does_not() -> None:
    talk = Talk()
    keyed = Hints(cache_key="thread-1")
    _, session, _ = opened(talk, keyed)
    told = [user("Before"), assistant("That."), user("and now?")]
    _, place = talk.ask(told, keyed)
    assert (place.session_id, place.kind) == (session, Kind.COMPACTED)
    assert place.evidence is Evidence.CACHE_KEY
    _, fresh = talk.ask([user("something else")], keyed)
    assert fresh.kind is Kind.NEW


def test_a_call_that_the_client_rewrote_is_recognized_by_its_id() -> None:
    talk = Talk()
    opened(talk)
    asked = [user("hello there")]
    group, one = talk.turn(asked, assistant("", call("call_9", "{broken", name="reed")))
    invalid = assistant("", call("call_9", '{"tool":"reed","error":"unknown"}', name="invalid"))
    _, place = talk.ask([*asked, invalid, tool("call_9", "no such tool")])
    assert (place.session_id, place.parent_id) == (one.session_id, group)
    assert (place.turn, place.evidence) == (1, Evidence.TOOL_CALL_ID)


def test_an_id_tells_the_deepest_answer_where_its_words_were_changed() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    asked = [*history, user("read it")]
    group, _ = talk.turn(asked, assistant("", call("call_9", "{broken")))
    other, _ = talk.turn(asked, assistant("", call("call_10", "{so too")))
    for call_id, parent_id in (("call_9", group), ("call_10", other)):
        told = assistant("", call(call_id, "{}", name="invalid"))
        _, place = talk.ask([*asked, told, tool(call_id, "no such tool")])
        assert (place.session_id, place.parent_id, place.turn) == (session, parent_id, 2)


def test_an_id_tells_twins_apart() -> None:
    talk = Talk()
    found: dict[str, tuple[str, Place]] = {}
    for call_id in ("call_1", "call_2"):
        found[call_id] = talk.turn([user("read it")], assistant("", call(call_id)))
    for _ in range(2):  # for the second time all have been gone on from
        for call_id in ("call_2", "call_1"):
            told = assistant("", call(call_id))
            _, place = talk.turn([user("read it"), told, tool(call_id, "text")], "Done.")
            group_id, first = found[call_id]
            assert (place.session_id, place.parent_id) == (first.session_id, group_id)
    for call_id in ("call_2", "call_1"):  # nor do later words tell
        told = [assistant("", call(call_id)), tool(call_id, "text"), assistant("Done.")]
        _, place = talk.turn([user("read it"), *told, user("thanks")], "Bye.")
        assert place.session_id == found[call_id][1].session_id


def test_ids_that_an_engine_counts_tell_nothing() -> None:
    talk = Talk()
    found = {}
    for path in ("a", "b"):
        calls = assistant("", call("functions.read:0", f'{{"path": "{path}"}}'))
        found[path], _ = talk.turn([user("read it")], calls)
    for path in ("a", "b"):
        told = assistant("", call("functions.read:0", f'{{"path":"{path}"}}'))
        _, place = talk.ask([user("read it"), told, tool("functions.read:0", "text")])
        assert (place.parent_id, place.evidence) == (found[path], Evidence.PREFIX)


def test_only_a_served_answer_is_a_parent() -> None:
    talk = Talk()
    talk.turn([user("one")], "what the other got was a sibling that lost here")
    group, place = talk.turn([user("one")], "Yes.")
    _, after = talk.ask([user("one"), assistant("Yes."), user("two")])
    assert (after.session_id, after.parent_id) == (place.session_id, group)
    _, nobodys = talk.ask([user("one"), assistant("No."), user("two")])
    assert nobodys.evidence is not Evidence.PREFIX
    _, deep = talk.ask([user("zero"), assistant("No."), user("two")])
    assert (deep.kind, deep.parent_id) == (Kind.NEW, None)


def test_a_request_after_a_stopped_answer_has_its_session_and_no_parent() -> None:
    talk = Talk()
    group, first = talk.ask([user("tell me all")])
    talk.fail(group)
    _, place = talk.ask([user("tell me all"), assistant("It beg"), user("shorter")])
    assert (place.session_id, place.turn, place.parent_id) == (first.session_id, 2, None)
    assert (place.kind, place.evidence) == (Kind.CONTINUES, Evidence.QUESTION)


def test_a_request_with_a_reworded_answer_continues_the_answers_group() -> None:
    talk = Talk()
    history, session, _ = opened(talk)
    asked = [*history, user("more")]
    group, _ = talk.turn(asked, "More [1].")
    _, place = talk.ask([*asked, assistant("More."), user("go on")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)


def test_a_question_repeated_in_another_place_is_no_answer_to_it() -> None:
    """Both begin as a request did, and go on without an answer to it."""
    talk = Talk()
    talk.turn([user("hello there")], "Hi!")
    _, place = talk.ask([user("hello there"), user("are you there?")])
    assert (place.kind, place.evidence) == (Kind.NEW, Evidence.NONE)


def test_a_reworded_answer_belongs_to_the_session_that_was_not_continued_yet() -> None:
    talk = Talk()
    history, _, _ = opened(talk)
    talk.turn([*history, user("go on")], "Sure.")
    _, place = talk.ask([user("hello there"), assistant("Hello"), user("go on")])
    assert place.kind is Kind.NEW
    group, second = talk.turn([user("hello there")], "Hey!")
    _, after = talk.ask([user("hello there"), assistant("Hello"), user("go on")])
    assert (after.session_id, after.parent_id) == (second.session_id, group)


def test_a_reworded_opening_that_two_users_share_tells_nothing() -> None:
    talk = Talk()
    for _ in range(2):
        opened(talk)
    _, place = talk.ask([user("hello there"), assistant("Hello"), user("go on")])
    assert place.kind is Kind.NEW


def test_a_librarys_retry_repeats_the_failed_request() -> None:
    talk = Talk()
    group, first = talk.ask([user("hi")], size=70)
    talk.fail(group)
    retry = Hints(is_retry=True)
    second, place = talk.ask([user("hi")], retry, size=70)
    assert (place.session_id, place.turn) == (first.session_id, 1)
    assert (place.kind, place.evidence) == (Kind.REPEATS, Evidence.RETRY)
    talk.answer(second, "Hello")
    _, other = talk.ask([user("hi")], size=70)
    assert other.kind is Kind.NEW
    _, longer = talk.ask([user("hi")], retry, size=71)
    assert longer.kind is Kind.NEW


def test_an_answered_request_is_not_repeated() -> None:
    talk = Talk()
    talk.turn([user("hi")], "Hello")
    _, place = talk.ask([user("hi")], Hints(is_retry=True))
    assert place.kind is Kind.NEW


def test_an_answer_that_the_app_left_out_is_no_parent() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    talk.turn([*history, user("go on")], "Well.")
    _, place = talk.ask([*history, user("go on"), user("or not")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)
    assert place.kind is Kind.CONTINUES


def test_two_equal_requests_at_once_are_parallel_unless_one_is_a_retry() -> None:
    talk = Talk()
    _, first = talk.ask([user("hello there")], NAMED)
    _, second = talk.ask([user("hello there")], NAMED)
    assert (second.session_id, second.turn, second.kind) == (first.session_id, 1, Kind.PARALLEL)
    _, third = talk.ask([user("hello there")], replace(NAMED, is_retry=True))
    assert (third.turn, third.kind) == (1, Kind.REPEATS)


def test_each_request_that_failed_is_repeated_by_one() -> None:
    talk = Talk()
    failed = [talk.ask([user("hi")]) for _ in range(2)]
    for group_id, _ in failed:
        talk.fail(group_id)
    retry = Hints(is_retry=True)
    again = [talk.turn([user("hi")], "Hello", retry)[1] for _ in range(3)]
    assert [place.session_id for place in again[:2]] == [p.session_id for _, p in failed[::-1]]
    assert again[2].kind is Kind.NEW


def test_a_failed_request_is_repeated_within_its_session() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    failed, _ = talk.ask([*history, user("go on")])
    talk.fail(failed)
    _, place = talk.turn([*history, user("go on")], "Well.")
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.REPEATS


def test_words_behind_a_failed_message_are_the_next_turn() -> None:
    talk = Talk()
    history, session, group = opened(talk)
    failed, _ = talk.ask([*history, user("go on")])
    talk.fail(failed)
    _, place = talk.ask([*history, user("go on"), user("or stop")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)
    assert place.kind is Kind.CONTINUES


def test_a_response_id_tells_the_parent() -> None:
    talk = Talk()
    for _ in range(2):
        opened(talk)
    group, place = talk.ask([user("hello there")])
    talk.answer(group, "Hi!", "resp_1")
    told = [user("hello there"), assistant("Hi!"), user("go on")]
    _, after = talk.ask(told, Hints(response_id="resp_1"))
    assert (after.session_id, after.parent_id, after.turn) == (place.session_id, group, 2)
    assert after.evidence is Evidence.RESPONSE_ID


def test_another_system_prompt_is_no_other_session_but_tells_twins_apart() -> None:
    talk = Talk()
    places: dict[str, Place] = {}
    for day in ("Monday", "Tuesday"):
        system = {"role": "system", "content": f"It is {day}"}
        _, places[day] = talk.turn([system, user("hello there")], "Hi!")
    told = [user("hello there"), assistant("Hi!"), user("go on")]
    for day in ("Monday", "Tuesday"):
        _, place = talk.ask([{"role": "system", "content": f"It is {day}"}, *told])
        assert place.session_id == places[day].session_id
    _, later = talk.ask([{"role": "system", "content": "It is Friday"}, *told])
    assert later.parent_id is not None


def test_a_request_that_cannot_be_read_has_a_session_of_its_own() -> None:
    talk = Talk()
    places = [talk.turn([], "Hi!")[1] for _ in range(2)]
    assert len({place.session_id for place in places}) == 2
    assert {place.asked_key for place in places} == {""}
    named = [talk.turn([], "Hi!", NAMED)[1] for _ in range(2)]
    assert len({place.session_id for place in named}) == 1
