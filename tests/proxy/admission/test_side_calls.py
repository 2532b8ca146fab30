"""Side calls are recognised by rules; a request that no rule matches is a main call."""

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
from fakevllm.sessions.client_session_ids import hints_of
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


def chat_body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def rule(
    body: dict[str, Any], session: SessionSummary | None = None, rules: SideCallRules | None = None
) -> Any:
    return (rules or SideCallRules()).matching_rule("m", {}, body, session)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_known_beginning_of_the_system_or_only_message_is_a_side_call(marker: str) -> None:
    text = f"{marker} and more"
    assert rule(chat_body({"role": "system", "content": text}, user("hi"), tools=TOOLS)) == "marker"
    assert rule(chat_body({"role": "developer", "content": f"\n {text}"}, user("hi"))) == "marker"
    assert rule(chat_body(user(text))) == "marker"
    assert rule(chat_body(SYSTEM, user(text))) == "marker"
    assert (
        rule(chat_body({"role": "user", "content": [{"type": "text", "text": text}]})) == "marker"
    )
    assert rule({"prompt": text}) == "marker"


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_is_not_at_the_beginning_makes_no_side_call(marker: str) -> None:
    assert rule(chat_body(SYSTEM, user(f"What does '{marker}' mean?"))) is None
    later = (user("hi"), {"role": "assistant", "content": "Hello."}, user(marker))
    assert rule(chat_body(SYSTEM, *later)) is None
    assert (
        rule(chat_body({"role": "system", "content": f"Never say: {marker}"}, user("hi"))) is None
    )


def test_a_question_to_which_open_webui_adds_context_is_a_main_call() -> None:
    """The template for such a question begins like Open WebUI's side calls."""
    around = "### Task:\nRespond to the user query using the context.\n<context>a</context>\nWhy?"
    assert rule(chat_body(user(around))) is None
    assert rule(chat_body(SYSTEM, user(around))) is None
    assert rule(chat_body({"role": "system", "content": around}, user("Why?"))) is None
    assert rule(chat_body(user("### Task:\nGenerate 1-3 broad tags"))) == "marker"


def test_a_configured_marker_counts_in_addition_to_the_known_ones() -> None:
    rules = SideCallRules(markers=(*MARKERS, "Name this chat"))
    assert rule(chat_body(user("Name this chat: hi")), rules=rules) == "marker"
    assert rule(chat_body(user(MARKERS[0])), rules=rules) == "marker"


def test_configured_models_and_headers_take_precedence_over_guesses() -> None:
    rules = SideCallRules(models=("*-small",), headers=("X-Task: title*", "x-side"), guesses=())
    body = chat_body(user(MARKERS[0]))
    assert rules.matching_rule("big-small", {}, body) == "model"
    assert rules.matching_rule("big", {b"x-task": b"title-7"}, body) == "header"
    assert rules.matching_rule("big", {b"x-side": b""}, body) == "header"
    assert rules.matching_rule("big", {b"x-task": b"main"}, body) is None


def test_a_call_without_tools_in_a_session_that_has_them_is_a_side_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body(SYSTEM, user(QUESTION), tools=TOOLS))
    assert rule(chat_body(user("Three follow-ups, please")), sessions.get("s")) == "no_tools"
    assert rule(chat_body(SYSTEM, user("more"), tools=TOOLS), sessions.get("s")) is None
    assert sessions.get("another") is None
    assert rule(chat_body(user("Three follow-ups, please")), None) is None


def test_a_call_without_tools_that_follows_a_tools_result_is_a_main_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body(SYSTEM, user(QUESTION), tools=TOOLS))
    result = {"role": "tool", "tool_call_id": "c", "content": "handed over"}
    assert rule(chat_body(user(QUESTION), result), sessions.get("s")) is None


def test_a_session_that_had_tools_once_keeps_them() -> None:
    sessions = SessionSummaries()
    for body in (chat_body(user("a")), chat_body(user("b"), tools=TOOLS), chat_body(user("c"))):
        sessions.note("s", body)
    known = sessions.get("s")
    assert known is not None and (known.has_tools, known.opening) == (True, "a")
    assert len(known.system) == 16, "a hash, however long the prompt is"


def test_a_conversation_that_quotes_the_sessions_first_question_is_a_side_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body(SYSTEM, user(QUESTION)))
    about = f"Generate a title for this conversation:\n{QUESTION}"
    titler = {"role": "system", "content": "You name things."}
    assert rule(chat_body(titler, user(about)), sessions.get("s")) == "quoted"
    assert rule(chat_body(user("Generate a title:"), user(QUESTION)), sessions.get("s")) == "quoted"


@pytest.mark.parametrize(
    "body",
    [
        chat_body(SYSTEM, user(f"{QUESTION}, in English")),
        chat_body(SYSTEM, user(f"Please: {QUESTION}")),
        chat_body(user(f"{QUESTION} again")),
        chat_body(SYSTEM, user("Something else altogether")),
        chat_body({"role": "system", "content": "It is Monday."}, user(QUESTION)),
        chat_body(user(f"About {QUESTION}"), tools=TOOLS),
    ],
)
def test_an_edited_or_repeated_question_is_a_main_call(body: dict[str, Any]) -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body(SYSTEM, user(QUESTION)))
    assert rule(body, sessions.get("s")) is None


def test_a_session_that_was_shortened_under_another_date_is_a_main_call() -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body({"role": "system", "content": "It is Monday."}, user(QUESTION)))
    tuesday = {"role": "system", "content": "It is Tuesday."}
    short = [user(f"So far: {QUESTION}"), {"role": "assistant", "content": "I see."}, user("Go on")]
    assert rule(chat_body(tuesday, *short), sessions.get("s")) is None
    assert rule(chat_body(tuesday, user(f"Title for: {QUESTION}")), sessions.get("s")) == "quoted"


def test_a_question_that_is_too_short_counts_as_no_quote() -> None:
    sessions = SessionSummaries()
    sessions.note("s", chat_body(SYSTEM, user("hi")))
    assert rule(chat_body(user("What is this?")), sessions.get("s")) is None


def test_summaries_of_the_oldest_sessions_are_removed() -> None:
    sessions = SessionSummaries(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.note(name, chat_body(user(name)))
    assert [sessions.get(name) is not None for name in "abc"] == [True, False, True]


def test_a_disabled_guess_does_not_count() -> None:
    session = SessionSummary(True, b"", QUESTION)
    body = chat_body(user(f"### Task:\n{QUESTION}"))
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
def test_a_malformed_body_causes_no_error(body: dict[str, Any], messages: list[Any]) -> None:
    session = SessionSummary(True, b"", QUESTION)
    for one in (body, body | {"messages": messages}):
        assert rule(one, session) in (None, "no_tools", "marker", "quoted")
        SessionSummaries().note("s", one)


def test_a_header_is_found_by_its_name_in_any_case() -> None:
    assert has_header({b"x-a": b"b"}, "X-A") and not has_header({b"x-b": b""}, "X-A: *")


# --- recorded requests of unmodified clients

needs_recordings = pytest.mark.skipif(
    not FOLDER.exists(), reason="no recordings of clients are stored beside this checkout"
)


def classify(recordings: list[Recorded], rules: SideCallRules) -> list[tuple[Recorded, str | None]]:
    """Return each request with the rule that matches it, as the proxy would find it on arrival."""
    sessions = SessionSummaries()
    classified: list[tuple[Recorded, str | None]] = []
    for request in recordings:
        if request.path not in ROUTES:
            continue
        try:
            body = ROUTES[request.path].open(request.body, EngineInfo()).body
        except NotTranslated:
            body = {}
        name = f"{request.client} {hints_of(request.headers, request.body).session}"
        session = sessions.get(name) if not name.endswith(" None") else None
        matching = rules.matching_rule(
            str(request.body.get("model")), request.headers, body, session
        )
        if matching is None:
            sessions.note(name, body)
        classified.append((request, matching))
    return classified


def is_side(request: Recorded) -> bool:
    """Return whether a recorded request is a side call, without use of the rules.

    All main calls of opencode have tools. Open WebUI requests its side calls without streaming,
    after a turn in its user interface. The other clients make no side calls.
    """
    if request.client.startswith("opencode"):
        return not request.body.get("tools")
    is_a_turn = request.scenario in ("owui_ui_t1", "owui_ui_t2", "owui_nohdr")
    return is_a_turn and request.body.get("stream") is False


@needs_recordings
def test_every_recorded_side_call_is_recognised_and_no_main_call_is_mistaken_for_one() -> None:
    classified = classify(recorded(), SideCallRules())
    wrong = [str(one) for one, by in classified if (by is not None) != is_side(one)]
    assert wrong == [] and sum(by is not None for _, by in classified) >= 10


@needs_recordings
def test_the_name_of_the_small_model_recognises_only_opencodes_titles() -> None:
    rules = SideCallRules(models=("stub-small",), guesses=())
    titles = [one for one, by in classify(recorded(), rules) if by == "model"]
    assert len(titles) >= 3 and all(map(is_side, titles))


@needs_recordings
def test_without_markers_no_main_call_is_mistaken_for_a_side_call() -> None:
    classified = classify(recorded(), SideCallRules(guesses=("no_tools", "quoted")))
    assert [str(one) for one, by in classified if by is not None and not is_side(one)] == []
    by_rule = Counter(by for one, by in classified if is_side(one))
    assert by_rule["no_tools"] >= 6


SHOWN_NAMES = {"opencode_faults": "opencode, while the server fails now and then"}


@needs_recordings
def test_the_table_in_the_docs_equals_the_results_of_the_rules() -> None:
    all_rules = classify(recorded(), SideCallRules())
    unmarked = classify(recorded(), SideCallRules(guesses=("no_tools", "quoted")))
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
        f"| {SHOWN_NAMES.get(client, client)} | "
        + " | ".join(str(row[name]) for name in columns)
        + " |"
        for client, row in sorted(rows.items())
    ]
    page = TRAFFIC.read_text() if TRAFFIC.exists() else ""
    assert [line for line in lines if line not in page] == []
