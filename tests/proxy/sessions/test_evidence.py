"""The evidence by which requests are assigned to sessions."""

from __future__ import annotations

from dataclasses import replace

from fakevllm.sessions.client_session_ids import Hints
from fakevllm.sessions.types import Evidence, Kind, Place
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


def test_requests_of_two_named_users_are_never_in_one_session() -> None:
    client = SessionClient()
    history, _, _ = open_session(client, Hints(user="ann"))
    _, place = client.request([*history, user("go on")], Hints(user="bob"))
    assert (place.kind, place.parent_id) == (Kind.NEW, None)


def test_an_api_key_never_finds_sessions_of_another_key() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    _, place = client.request([*history, user("go on")], scope="other")
    assert place.session_id != session and place.parent_id is None
    _, named = client.request([user("a")], NAMED)
    _, elsewhere = client.request([user("a")], NAMED, scope="other")
    assert named.session_id != elsewhere.session_id


def test_an_answer_of_two_sessions_identifies_neither() -> None:
    client = SessionClient()
    for opening in ("one", "two"):
        client.turn([user(opening)], LONG)
    _, place = client.request([user("three"), assistant(LONG), user("and now?")])
    assert (place.kind, place.evidence) == (Kind.NEW, Evidence.NONE)


def test_a_cache_key_of_one_session_identifies_it_if_the_history_does_not() -> None:
    client = SessionClient()
    keyed = Hints(cache_key="thread-1")
    _, session, _ = open_session(client, keyed)
    messages = [user("Before"), assistant("That."), user("and now?")]
    _, place = client.request(messages, keyed)
    assert (place.session_id, place.kind) == (session, Kind.COMPACTED)
    assert place.evidence is Evidence.CACHE_KEY
    _, fresh = client.request([user("something else")], keyed)
    assert fresh.kind is Kind.NEW


def test_a_call_that_the_client_rewrote_is_recognized_by_its_id() -> None:
    client = SessionClient()
    open_session(client)
    request = [user("hello there")]
    group, one = client.turn(request, assistant("", call("call_9", "{broken", name="reed")))
    invalid = assistant("", call("call_9", '{"tool":"reed","error":"unknown"}', name="invalid"))
    _, place = client.request([*request, invalid, tool("call_9", "no such tool")])
    assert (place.session_id, place.parent_id) == (one.session_id, group)
    assert (place.turn, place.evidence) == (1, Evidence.TOOL_CALL_ID)


def test_a_tool_call_id_identifies_the_deepest_answer_if_its_text_was_changed() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    request = [*history, user("read it")]
    group, _ = client.turn(request, assistant("", call("call_9", "{broken")))
    other, _ = client.turn(request, assistant("", call("call_10", "{so too")))
    for call_id, parent_id in (("call_9", group), ("call_10", other)):
        rewritten = assistant("", call(call_id, "{}", name="invalid"))
        _, place = client.request([*request, rewritten, tool(call_id, "no such tool")])
        assert (place.session_id, place.parent_id, place.turn) == (session, parent_id, 2)


def test_a_tool_call_id_distinguishes_equal_sessions() -> None:
    client = SessionClient()
    found: dict[str, tuple[str, Place]] = {}
    for call_id in ("call_1", "call_2"):
        found[call_id] = client.turn([user("read it")], assistant("", call(call_id)))
    for _ in range(2):  # in the second round, all answers have been continued already
        for call_id in ("call_2", "call_1"):
            answer = assistant("", call(call_id))
            _, place = client.turn([user("read it"), answer, tool(call_id, "text")], "Done.")
            group_id, first = found[call_id]
            assert (place.session_id, place.parent_id) == (first.session_id, group_id)
    for call_id in ("call_2", "call_1"):  # the later messages are equal too
        messages = [assistant("", call(call_id)), tool(call_id, "text"), assistant("Done.")]
        _, place = client.turn([user("read it"), *messages, user("thanks")], "Bye.")
        assert place.session_id == found[call_id][1].session_id


def test_counted_tool_call_ids_are_no_evidence() -> None:
    client = SessionClient()
    found = {}
    for path in ("a", "b"):
        calls = assistant("", call("functions.read:0", f'{{"path": "{path}"}}'))
        found[path], _ = client.turn([user("read it")], calls)
    for path in ("a", "b"):
        answer = assistant("", call("functions.read:0", f'{{"path":"{path}"}}'))
        _, place = client.request([user("read it"), answer, tool("functions.read:0", "text")])
        assert (place.parent_id, place.evidence) == (found[path], Evidence.PREFIX)


def test_only_a_served_answer_is_a_parent() -> None:
    client = SessionClient()
    client.turn([user("one")], "another answer")
    group, place = client.turn([user("one")], "Yes.")
    _, after = client.request([user("one"), assistant("Yes."), user("two")])
    assert (after.session_id, after.parent_id) == (place.session_id, group)
    _, unserved = client.request([user("one"), assistant("No."), user("two")])
    assert unserved.evidence is not Evidence.PREFIX
    _, deep = client.request([user("zero"), assistant("No."), user("two")])
    assert (deep.kind, deep.parent_id) == (Kind.NEW, None)


def test_a_request_after_a_stopped_answer_has_its_session_and_no_parent() -> None:
    client = SessionClient()
    group, first = client.request([user("tell me all")])
    client.fail(group)
    _, place = client.request([user("tell me all"), assistant("It beg"), user("shorter")])
    assert (place.session_id, place.turn, place.parent_id) == (first.session_id, 2, None)
    assert (place.kind, place.evidence) == (Kind.CONTINUES, Evidence.QUESTION)


def test_a_request_with_a_reworded_answer_continues_the_answers_group() -> None:
    client = SessionClient()
    history, session, _ = open_session(client)
    request = [*history, user("more")]
    group, _ = client.turn(request, "More [1].")
    _, place = client.request([*request, assistant("More."), user("go on")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)


def test_a_message_in_place_of_the_answer_does_not_continue_a_session() -> None:
    """The second request begins like the first and contains no answer to it."""
    client = SessionClient()
    client.turn([user("hello there")], "Hi!")
    _, place = client.request([user("hello there"), user("are you there?")])
    assert (place.kind, place.evidence) == (Kind.NEW, Evidence.NONE)


def test_a_reworded_answer_belongs_to_the_session_that_was_not_continued_yet() -> None:
    client = SessionClient()
    history, _, _ = open_session(client)
    client.turn([*history, user("go on")], "Sure.")
    _, place = client.request([user("hello there"), assistant("Hello"), user("go on")])
    assert place.kind is Kind.NEW
    group, second = client.turn([user("hello there")], "Hey!")
    _, after = client.request([user("hello there"), assistant("Hello"), user("go on")])
    assert (after.session_id, after.parent_id) == (second.session_id, group)


def test_a_reworded_answer_of_two_sessions_identifies_neither() -> None:
    client = SessionClient()
    for _ in range(2):
        open_session(client)
    _, place = client.request([user("hello there"), assistant("Hello"), user("go on")])
    assert place.kind is Kind.NEW


def test_a_librarys_retry_repeats_the_failed_request() -> None:
    client = SessionClient()
    group, first = client.request([user("hi")], size=70)
    client.fail(group)
    retry = Hints(is_retry=True)
    second, place = client.request([user("hi")], retry, size=70)
    assert (place.session_id, place.turn) == (first.session_id, 1)
    assert (place.kind, place.evidence) == (Kind.REPEATS, Evidence.RETRY)
    client.answer(second, "Hello")
    _, other = client.request([user("hi")], size=70)
    assert other.kind is Kind.NEW
    _, longer = client.request([user("hi")], retry, size=71)
    assert longer.kind is Kind.NEW


def test_an_answered_request_is_not_repeated() -> None:
    client = SessionClient()
    client.turn([user("hi")], "Hello")
    _, place = client.request([user("hi")], Hints(is_retry=True))
    assert place.kind is Kind.NEW


def test_an_answer_that_the_app_left_out_is_no_parent() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    client.turn([*history, user("go on")], "Well.")
    _, place = client.request([*history, user("go on"), user("or not")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)
    assert place.kind is Kind.CONTINUES


def test_two_equal_requests_at_once_are_parallel_unless_one_is_a_retry() -> None:
    client = SessionClient()
    _, first = client.request([user("hello there")], NAMED)
    _, second = client.request([user("hello there")], NAMED)
    assert (second.session_id, second.turn, second.kind) == (first.session_id, 1, Kind.PARALLEL)
    _, third = client.request([user("hello there")], replace(NAMED, is_retry=True))
    assert (third.turn, third.kind) == (1, Kind.REPEATS)


def test_each_request_that_failed_is_repeated_by_one() -> None:
    client = SessionClient()
    failed = [client.request([user("hi")]) for _ in range(2)]
    for group_id, _ in failed:
        client.fail(group_id)
    retry = Hints(is_retry=True)
    again = [client.turn([user("hi")], "Hello", retry)[1] for _ in range(3)]
    assert [place.session_id for place in again[:2]] == [p.session_id for _, p in failed[::-1]]
    assert again[2].kind is Kind.NEW


def test_a_failed_request_is_repeated_within_its_session() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    failed, _ = client.request([*history, user("go on")])
    client.fail(failed)
    _, place = client.turn([*history, user("go on")], "Well.")
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 2)
    assert place.kind is Kind.REPEATS


def test_a_message_after_a_failed_request_is_the_next_turn() -> None:
    client = SessionClient()
    history, session, group = open_session(client)
    failed, _ = client.request([*history, user("go on")])
    client.fail(failed)
    _, place = client.request([*history, user("go on"), user("or stop")])
    assert (place.session_id, place.parent_id, place.turn) == (session, group, 3)
    assert place.kind is Kind.CONTINUES


def test_a_response_id_identifies_the_parent() -> None:
    client = SessionClient()
    for _ in range(2):
        open_session(client)
    group, place = client.request([user("hello there")])
    client.answer(group, "Hi!", "resp_1")
    messages = [user("hello there"), assistant("Hi!"), user("go on")]
    _, after = client.request(messages, Hints(response_id="resp_1"))
    assert (after.session_id, after.parent_id, after.turn) == (place.session_id, group, 2)
    assert after.evidence is Evidence.RESPONSE_ID


def test_a_system_prompt_distinguishes_only_otherwise_equal_sessions() -> None:
    client = SessionClient()
    places: dict[str, Place] = {}
    for day in ("Monday", "Tuesday"):
        system = {"role": "system", "content": f"It is {day}"}
        _, places[day] = client.turn([system, user("hello there")], "Hi!")
    messages = [user("hello there"), assistant("Hi!"), user("go on")]
    for day in ("Monday", "Tuesday"):
        _, place = client.request([{"role": "system", "content": f"It is {day}"}, *messages])
        assert place.session_id == places[day].session_id
    _, later = client.request([{"role": "system", "content": "It is Friday"}, *messages])
    assert later.parent_id is not None


def test_a_request_without_messages_starts_a_new_session() -> None:
    client = SessionClient()
    places = [client.turn([], "Hi!")[1] for _ in range(2)]
    assert len({place.session_id for place in places}) == 2
    assert {place.asked_key for place in places} == {""}
    named = [client.turn([], "Hi!", NAMED)[1] for _ in range(2)]
    assert len({place.session_id for place in named}) == 1
