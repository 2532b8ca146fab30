"""The types for the places of requests in the session tree. `Place` is such a place.
`IncomingRequest` is a request that has no place yet. `PlacedRequest` is a request with its place,
as stored in the ledger (the proxy's database)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm.sessions.client_session_ids import NO_HINTS, Hints
from fakevllm.sessions.normalize import MessageHistory, PromptHash


class Kind(StrEnum):
    """The role of a request in its session. The parent is the earlier request whose answer this
    request continues.

    new          The request opens the session.
    sub_agent    The request opens the session of a sub-agent. Its parent is the group of another
                 session that started the sub-agent.
    continues    The request continues the parent's answer.
    regenerates  The request has the same history as an earlier request that was answered.
    repeats      The request has the same history as an earlier request that failed.
    edits        Only the last message differs from the messages of an earlier request.
    compacted    The request continues the session with a shortened or rewritten history.
    parallel     The request arrived while another request of the session was not answered yet.
    side         The app makes the call for itself, for example for a title. No turn begins.
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
    """The evidence by which a session was found. The most certain kind comes first.

    header        A header names the session.
    body          A field of the body names the session.
    response_id   `previous_response_id` names an answer of the session.
    tool_call_id  The history has the id of a tool call that an answer of the session made.
    prefix        The history begins with the history and the answer of an earlier request.
    retry         An equal request failed, and the client marks the new request as a retry.
    question      The history begins with an earlier request's history, then a reworded answer.
    answer        The history has an answer of the session, but not the messages before it.
    cache_key     The session has the request's `prompt_cache_key`. No history matches.
    quote         The text of the request quotes a question of the session.
    none          There is no evidence. The request then usually opens a session.
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
class IncomingRequest:
    """A request for which a place in the session tree is sought.

    This class and `Place` are not frozen dataclasses, because frozen objects take longer to create.
    An object of each of the two classes is created for every request.
    """

    group_id: str
    scope: str
    """Fingerprint of the app's API key. Sessions of other keys are never found."""
    history: MessageHistory
    received_at: float
    """Time of a monotonic clock in seconds."""
    size: int = 0
    """Size of the body in bytes. A retry has the same size as the first attempt."""
    hints: Hints = NO_HINTS
    is_side: bool = False
    prompt_hash: PromptHash | None = field(default=None, compare=False)
    """Hash of the prompt, for a request without messages."""


@dataclass(slots=True, kw_only=True)
class Place:
    """The place of a request in the session tree.

    >>> Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES).evidence.value
    'none'
    """

    session_id: str
    parent_id: str | None
    """The group whose served answer the request continues."""
    turn: int
    """Number of the turn in the session, from 1. A tool's result does not begin a turn."""
    kind: Kind
    evidence: Evidence = Evidence.NONE
    parent_session_id: str | None = None
    asked_key: str = ""
    """Key (hash) of the request's message history, in hex. The key is "" if later requests cannot
    be recognized by the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """A request and its place, as they are recorded in the ledger, the proxy's database."""

    group_id: str
    scope: str
    place: Place
    received_at: float
    """Time at which the request was received, in Unix seconds."""
    response_id: str | None = None
    message_json: str | None = None
    """The served message; None if the app did not get the whole answer."""
