"""Where a request stands: its session, its parent, its turn; and what the tree must know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm.sessions.hints import NO_HINTS, Hints
from fakevllm.sessions.normalize import History, TextSoFar


class Kind(StrEnum):
    """What a request is to its session.

    new          opens it
    sub_agent    opens it, started by another session
    continues    goes on from the parent's answer
    regenerates  asks what was answered before, once more
    repeats      asks what failed before, once more
    edits        goes on from the parent's answer in another way than an earlier request did
    compacted    goes on in the session, but with a history that was shortened or told anew
    parallel     stands beside a request that was not answered yet
    side         a call the app makes for itself: a title, a summary; takes no turn
    """

    NEW = "new"
    SUB_AGENT = "sub_agent"
    CONTINUES = "continues"
    REGENERATES = "regenerates"
    REPEATS = "repeats"
    EDITS = "edits"
    COMPACTED = "compacted"
    PARALLEL = "parallel"
    SIDE = "side"


class Evidence(StrEnum):
    """What told the session, surest first.

    header        a header that names it
    body          a field that names it
    response_id   `previous_response_id`
    tool_call_id  an id of a call we issued
    prefix        the history begins with what was asked and answered
    retry         the same history failed before
    question      the history begins with what was asked; the answer was told differently
    answer        the history holds an answer of ours, behind another beginning
    cache_key     `prompt_cache_key`, where the history tells nothing
    quote         the text quotes the session's question
    none          nothing: a session of its own
    """

    HEADER = "header"
    BODY = "body"
    RESPONSE_ID = "response_id"
    TOOL_CALL_ID = "tool_call_id"
    PREFIX = "prefix"
    RETRY = "retry"
    QUESTION = "question"
    ANSWER = "answer"
    CACHE_KEY = "cache_key"
    QUOTE = "quote"
    NONE = "none"


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request, as the tree sees it. Not frozen, nor is its place: both are made for every request
    of the app."""

    group_id: str
    scope: str
    """Whose it is: nothing is found beyond it."""
    history: History
    received_at: float
    """Unix seconds."""
    size: int = 0
    """Of the body in bytes: who sends it again sends as many."""
    hints: Hints = NO_HINTS
    is_side: bool = False
    text: TextSoFar | None = field(default=None, compare=False)
    """Of a request without messages."""


@dataclass(slots=True, kw_only=True)
class Place:
    """
    >>> Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES).evidence.value
    'none'
    """

    session_id: str
    parent_id: str | None
    """The group whose served answer the request goes on from."""
    turn: int
    """From 1; a tool's result begins none."""
    kind: Kind
    evidence: Evidence = Evidence.NONE
    parent_session_id: str | None = None
    asked_key: str = ""
    """The history's key in hex; "" where it cannot be continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """A group as the ledger kept it."""

    group_id: str
    scope: str
    place: Place
    received_at: float
    response_id: str | None = None
    message_json: str | None = None
    """What was served."""
