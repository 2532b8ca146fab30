"""Side calls are known by rules, and what no rule knows is a main call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.side_calls import (
    MARKERS,
    SessionSummaries,
    SessionSummary,
    SideCallRules,
    has_header,
)
from fakevllm.sessions.hints import hints_of
from fakevllm_adapters.formats.base import EngineInfo, NotTranslated
from fakevllm_adapters.formats.registry import ADAPTERS
from tests.proxy.transport.recorded_traffic import FOLDER, Recorded, recorded

TOOLS = [{"type": "function", "function": {"name": "bash"}}]
QUESTION = "Read notes.txt and write a summary"
SYSTEM = {"role": "system", "content": "You are an agent."}
ROUTES = {adapter.path: adapter for adapter in ADAPTERS.values()}
TRAFFIC = Path(__file__).parents[3] / "docs" / "traffic.md"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asks(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def rule(
    body: dict[str, Any], session: SessionSummary | None = None, rules: SideCallRules | None = None
) -> Any:
    return (rules or SideCallRules()).matching_rule("m", {}, body, session)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_known_beginning_of_the_system_or_only_message_is_a_side_call(marker: str) -> None:
    text = f"{marker} and more"
    assert rule(asks({"role": "system", "content": text}, user("hi"), tools=TOOLS)) == "marker"
    assert rule(asks({"role": "developer", "content": f"\n {text}"}, user("hi"))) == "marker"
    assert rule(asks(user(text))) == "marker"
    assert rule(asks(SYSTEM, user(text))) == "marker"
    assert rule(asks({"role": "user", "content": [{"type": "text", "text": text}]})) == "marker"
    assert rule({"prompt": text}) == "marker"


@pytest.mark.parametrize("marker", MARKERS)
def test_a_beginning_that_is_only_spoken_of_is_a_main_call(marker: str) -> None:
    assert rule(asks(SYSTEM, user(f"What does '{marker}' mean?"))) is None
    later = (user("hi"), {"role": "assistant", "content": "Hello."}, user(marker))
    assert rule(asks(SYSTEM, *later)) is None
    assert rule(asks({"role": "system", "content": f"Never say: {marker}"}, user("hi"))) is None


def test_a_question_that_open_webui_gives_context_is_a_main_call() -> None:
    """Its template begins as its tasks do."""
    around = "### Task:\nRespond to the user query using the context.\n<context>a</context>\nWhy?"
    assert rule(asks(user(around))) is None
    assert rule(asks(SYSTEM, user(around))) is None
    assert rule(asks({"role": "system", "content": around}, user("Why?"))) is None
    assert rule(asks(user("### Task:\nGenerate 1-3 broad tags"))) == "marker"


def test_a_marker_of_ones_own_counts_beside_the_known_ones() -> None:
    rules = SideCallRules(markers=(*MARKERS, "Name this chat"))
    assert rule(asks(user("Name this chat: hi")), rules=rules) == "marker"
    assert rule(asks(user(MARKERS[0])), rules=rules) == "marker"


def test_what_the_operator_names_counts_before_all_guesses() -> None:
    rules = SideCallRules(models=("*-small",), headers=("X-Task: title*", "x-side"), guesses=())
    body = asks(user(MARKERS[0]))
    assert rules.matching_rule("big-small", {}, body) == "model"
    assert rules.matching_rule("big", {b"x-task": b"title-7"}, body) == "header"
    assert rules.matching_rule("big", {b"x-side": b""}, body) == "header"
    assert rules.matching_rule("big", {b"x-task": b"main"}, body) is None


def test_a_call_without_tools_in_a_session_that_has_them_is_a_side_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks(SYSTEM, user(QUESTION), tools=TOOLS))
    assert rule(asks(user("Three follow-ups, please")), sessions.get("s")) == "no_tools"
    assert rule(asks(SYSTEM, user("more"), tools=TOOLS), sessions.get("s")) is None
    assert sessions.get("another") is None
    assert rule(asks(user("Three follow-ups, please")), None) is None


def test_a_tools_result_is_answered_by_an_agent_that_has_no_tools() -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks(SYSTEM, user(QUESTION), tools=TOOLS))
    result = {"role": "tool", "tool_call_id": "c", "content": "handed over"}
    assert rule(asks(user(QUESTION), result), sessions.get("s")) is None


def test_a_session_that_had_tools_once_has_them_for_good() -> None:
    sessions = SessionSummaries()
    for body in (asks(user("a")), asks(user("b"), tools=TOOLS), asks(user("c"))):
        sessions.note("s", body)
    known = sessions.get("s")
    assert known is not None and (known.has_tools, known.opening) == (True, "a")
    assert len(known.system) == 16, "a key, however long the prompt is"


def test_a_conversation_about_the_sessions_first_question_is_a_side_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks(SYSTEM, user(QUESTION)))
    about = f"Generate a title for this conversation:\n{QUESTION}"
    titler = {"role": "system", "content": "You name things."}
    assert rule(asks(titler, user(about)), sessions.get("s")) == "quoted"
    assert rule(asks(user("Generate a title:"), user(QUESTION)), sessions.get("s")) == "quoted"


@pytest.mark.parametrize(
    "body",
    [
        asks(SYSTEM, user(f"{QUESTION}, in English")),
        asks(SYSTEM, user(f"Please: {QUESTION}")),
        asks(user(f"{QUESTION} again")),
        asks(SYSTEM, user("Something else altogether")),
        asks({"role": "system", "content": "It is Monday."}, user(QUESTION)),
        asks(user(f"About {QUESTION}"), tools=TOOLS),
    ],
)
def test_an_edited_or_repeated_question_is_a_main_call(body: dict[str, Any]) -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks(SYSTEM, user(QUESTION)))
    assert rule(body, sessions.get("s")) is None


def test_a_session_that_was_shortened_under_another_date_is_a_main_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks({"role": "system", "content": "It is Monday."}, user(QUESTION)))
    tuesday = {"role": "system", "content": "It is Tuesday."}
    short = [user(f"So far: {QUESTION}"), {"role": "assistant", "content": "I see."}, user("Go on")]
    assert rule(asks(tuesday, *short), sessions.get("s")) is None
    assert rule(asks(tuesday, user(f"Title for: {QUESTION}")), sessions.get("s")) == "quoted"


def test_a_question_too_short_to_be_a_quote_is_none() -> None:
    sessions = SessionSummaries()
    sessions.note("s", asks(SYSTEM, user("hi")))
    assert rule(asks(user("What is this?")), sessions.get("s")) is None


def test_the_sessions_of_old_are_forgotten() -> None:
    sessions = SessionSummaries(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.note(name, asks(user(name)))
    assert [sessions.get(name) is not None for name in "abc"] == [True, False, True]


def test_a_guess_that_was_turned_off_does_not_count() -> None:
    session = SessionSummary(True, b"", QUESTION)
    body = asks(user(f"### Task:\n{QUESTION}"))
    rules = {guess: SideCallRules(guesses=(guess,)) for guess in ("no_tools", "marker", "quoted")}
    assert rule(body, session, rules["no_tools"]) == "no_tools"
    assert rule(body, session, rules["marker"]) == "marker"
    assert rule(body, SessionSummary(False, b"You are", QUESTION), rules["quoted"]) == "quoted"
    assert rule(body, session, SideCallRules(guesses=())) is None


_json = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_odd = st.fixed_dictionaries(
    {}, optional={name: _json for name in ("messages", "prompt", "tools", "model")}
)


@given(
    body=_odd,
    messages=st.lists(
        st.fixed_dictionaries({}, optional={"role": _json, "content": _json}) | _json, max_size=4
    ),
)
def test_a_body_however_odd_is_a_main_call_or_a_side_call(
    body: dict[str, Any], messages: list[Any]
) -> None:
    session = SessionSummary(True, b"", QUESTION)
    for one in (body, body | {"messages": messages}):
        assert rule(one, session) in (None, "no_tools", "marker", "quoted")
        SessionSummaries().note("s", one)


def test_a_header_is_found_by_its_name_in_any_case() -> None:
    assert has_header({b"x-a": b"b"}, "X-A") and not has_header({b"x-b": b""}, "X-A: *")


# --- what unmodified clients sent

needs_recordings = pytest.mark.skipif(
    not FOLDER.exists(), reason="no recordings of clients lie beside this checkout"
)


def found_in(recordings: list[Recorded], rules: SideCallRules) -> list[tuple[Recorded, str | None]]:
    """Each request with the rule it was known by, as the proxy would tell while they come."""
    sessions = SessionSummaries()
    found: list[tuple[Recorded, str | None]] = []
    for one in recordings:
        if one.path not in ROUTES:
            continue
        try:
            body = ROUTES[one.path].open(one.body, EngineInfo()).body
        except NotTranslated:
            body = {}
        name = f"{one.client} {hints_of(one.headers, one.body).session}"
        known = sessions.get(name) if not name.endswith(" None") else None
        by = rules.matching_rule(str(one.body.get("model")), one.headers, body, known)
        if by is None:
            sessions.note(name, body)
        found.append((one, by))
    return found


def is_side(one: Recorded) -> bool:
    """Told without the rules: opencode's main calls all have tools; Open WebUI's tasks come as
    whole answers, behind a turn in its user interface; the others make no side calls."""
    if one.client.startswith("opencode"):
        return not one.body.get("tools")
    is_a_turn = one.scenario in ("owui_ui_t1", "owui_ui_t2", "owui_nohdr")
    return is_a_turn and one.body.get("stream") is False


@needs_recordings
def test_every_recorded_side_call_is_known_and_no_main_call_is_taken_for_one() -> None:
    found = found_in(recorded(), SideCallRules())
    wrong = [str(one) for one, by in found if (by is not None) != is_side(one)]
    assert wrong == [] and sum(by is not None for _, by in found) >= 10


@needs_recordings
def test_the_names_of_small_models_tell_opencodes_titles_alone() -> None:
    rules = SideCallRules(models=("stub-small",), guesses=())
    titles = [one for one, by in found_in(recorded(), rules) if by == "model"]
    assert len(titles) >= 3 and all(map(is_side, titles))


@needs_recordings
def test_without_any_marker_no_main_call_is_taken_for_a_side_call() -> None:
    found = found_in(recorded(), SideCallRules(guesses=("no_tools", "quoted")))
    assert [str(one) for one, by in found if by is not None and not is_side(one)] == []
    by_rule = Counter(by for one, by in found if is_side(one))
    assert by_rule["no_tools"] >= 6


@needs_recordings
def test_the_table_in_the_docs_is_what_the_rules_find() -> None:
    all_rules = found_in(recorded(), SideCallRules())
    unmarked = found_in(recorded(), SideCallRules(guesses=("no_tools", "quoted")))
    rows: dict[str, Counter[str]] = {}
    for one, by in all_rules:
        row = rows.setdefault(one.client, Counter())
        row["main"] += not is_side(one)
        row["side"] += is_side(one)
        row["known"] += is_side(one) and by is not None
        row["wrong"] += by is not None and not is_side(one)
    for other, by in unmarked:
        rows[other.client]["unmarked"] += is_side(other) and by is not None
    columns = ("main", "side", "known", "wrong", "unmarked")
    lines = [
        f"| {client} | " + " | ".join(str(row[name]) for name in columns) + " |"
        for client, row in sorted(rows.items())
    ]
    page = TRAFFIC.read_text() if TRAFFIC.exists() else ""
    assert [line for line in lines if line not in page] == []
