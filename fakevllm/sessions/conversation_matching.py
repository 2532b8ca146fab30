"""Find the session to which a request belongs, and the earlier answer that the request continues.

A lookup does not change the session tree. It tries several kinds of evidence, the most certain kind
first. The enum `Evidence` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from fakevllm.sessions.client_session_ids import Hints
from fakevllm.sessions.session_index import (
    EXCERPT_CHARS,
    GroupNode,
    GroupStatus,
    SessionIndex,
    SessionNode,
)
from fakevllm.sessions.types import Evidence, IncomingRequest

RETRY_WINDOW_S = 600.0
"""Maximum number of seconds between a request and its retry by a client library. A later request is
not taken for a retry."""
MAX_RECENT_SESSIONS = 500
"""Maximum number of sessions that are searched one by one, for a quote or for an equal cache
key."""
MAX_QUOTING_CHARS = 20_000
"""Maximum number of characters of a request that are searched for quotes of earlier questions."""


class HistoryMatch(NamedTuple):
    """An earlier group (a request with its sampled answers) that was found in the history of a new
    request, and the position where it was found. Either the group's question or its answer was
    found."""

    group: GroupNode
    at: int
    """Index of the found message in the new request's history. The message is the group's answer.
    If only the group's question was found, the message is this question."""


class LookupResult(NamedTuple):
    """The result of a lookup: the session of a request, and the answer that the request
    continues."""

    session: SessionNode | None
    """The session; None if the request needs a new one."""
    evidence: Evidence
    parent: GroupNode | None = None
    """The group whose answer the request continues."""
    base: HistoryMatch | None = None
    """The latest group of the session whose question or answer was found in the request's
    history."""


class SessionLookup:
    """The search for a request's session in the index of earlier groups (requests with their
    answers)."""

    def __init__(self, index: SessionIndex) -> None:
        self._index = index

    def find(self, request: IncomingRequest, named: SessionNode | None) -> LookupResult:
        """Return the session of a request, and the request's parent. The parent is the earlier
        group (a request with its answers) whose answer the request continues.

        `named` is the session that is named in the request's headers or body. `named` is None if
        the request contains no name, or if the index has no session of this name.
        """
        is_named = request.hints.session is not None
        issued, evidence = self._by_issued_id(request)
        within = named
        if is_named:
            evidence = Evidence.HEADER if request.hints.is_header else Evidence.BODY
        elif issued is not None:
            within = issued.group.session
        elif (failed := self._failed_before(request)) is not None:
            within, evidence = failed.session, Evidence.RETRY
        answered = self._answered_prefix(request, within)
        if issued is not None and (within is None or issued.group.session is within):
            answered = issued if answered is None or issued.at > answered.at else answered
        if is_named and named is None:  # a new session, or a fork of the one that matches
            return LookupResult(None, evidence, answered.group if answered else None, answered)
        result = self._by_history(request, answered, within, evidence)
        return result or self._by_other_evidence(request, within, evidence)

    def _by_history(
        self,
        request: IncomingRequest,
        answered: HistoryMatch | None,
        within: SessionNode | None,
        evidence: Evidence,
    ) -> LookupResult | None:
        """Find the session from the beginning of the request's history, which may repeat the
        messages of an earlier group. Return None if the beginning repeats no messages of an earlier
        group.

        `answered` is the match with an earlier answer, if such a match was found. If `within` is
        not None, only this session is searched. `evidence` is the kind of evidence for the session
        that was found before this call.
        """
        session = answered.group.session if answered else within
        if answered is not None and evidence is Evidence.NONE:
            evidence = Evidence.PREFIX
        question = self._question_prefix(request, session, answered.at if answered else -1)
        if question is not None:
            session = question.group.session
            evidence = Evidence.QUESTION if evidence is Evidence.NONE else evidence
            is_answered = request.history.messages[question.at + 1].role == "assistant"
            if question.group.status is GroupStatus.SERVED and is_answered:
                return LookupResult(session, evidence, question.group, question)
        if answered is None and question is None:
            return None
        parent = answered.group if answered else None
        return LookupResult(session, evidence, parent, question or answered)

    def _by_other_evidence(
        self, request: IncomingRequest, within: SessionNode | None, evidence: Evidence
    ) -> LookupResult:
        """Find the session of a request whose history does not begin with messages of an earlier
        group. The evidence is tried in this order:

        * an answer in the middle of the history
        * `within`, the session that was identified before this call, for example by a name in a
          header
        * the field `prompt_cache_key`
        * a quote of one of the session's questions, if the app makes the request for itself (for
          example, to get a title)
        """
        match = self._distinctive_answer(request, within)
        if match is not None:
            is_known = evidence is not Evidence.NONE
            evidence = evidence if is_known else Evidence.ANSWER
            return LookupResult(match.group.session, evidence, match.group, match)
        if within is not None:
            return LookupResult(within, evidence)
        cache_key = request.hints.cache_key
        if cache_key and request.history.has_answers:
            alike = [one for one in self._recent(request) if one.cache_key == cache_key]
            if len(alike) == 1:
                return LookupResult(alike[0], Evidence.CACHE_KEY)
        quoted = self._quoted(request) if request.is_side else None
        if quoted is None:
            return LookupResult(None, Evidence.NONE)
        return LookupResult(quoted, Evidence.QUOTE)

    def _by_issued_id(self, request: IncomingRequest) -> tuple[HistoryMatch | None, Evidence]:
        """Return (match, evidence) for the earlier answer whose response id or tool call id occurs
        in the request. A response id takes precedence over all tool call ids. Of several tool call
        ids, the last in the history counts. If no id belongs to an earlier answer, the match is
        None."""
        scope, history = request.scope, request.history
        response_id = request.hints.response_id
        if response_id is not None:
            for group in self._index.by_response_id.latest((scope, response_id)):
                roles = [message.role for message in history.messages]
                answers = [at for at, role in enumerate(roles) if role == "assistant"]
                return HistoryMatch(group, answers[-1] if answers else -1), Evidence.RESPONSE_ID
        for at in range(len(history.messages) - 1, -1, -1):
            for call_id in history.messages[at].call_ids:
                groups = list(self._index.by_call_id.latest((scope, call_id)))
                # Some engines count calls from 0 in each answer, so that many sessions share an id.
                if len({group.session.id for group in groups}) == 1:
                    return HistoryMatch(groups[0], at), Evidence.TOOL_CALL_ID
        return None, Evidence.NONE

    def _answered_prefix(
        self, request: IncomingRequest, within: SessionNode | None
    ) -> HistoryMatch | None:
        """Find an earlier group whose history, followed by its served answer, is the beginning of
        this request's history. Return the match with the longest beginning, or None if no group
        matches."""
        messages = request.history.messages
        by_answered = self._index.by_answered
        for at in range(len(messages) - 1, -1, -1):
            if not by_answered.has(messages[at].history_key):
                continue
            if at == len(messages) - 1 and messages[at].role != "assistant":
                continue  # the key of a history with an empty answer is that of its question
            groups = self._possible(by_answered.latest(messages[at].history_key), request, within)
            if groups:
                return HistoryMatch(max(groups, key=lambda group: _likeness(group, request)), at)
        return None

    def _question_prefix(
        self, request: IncomingRequest, session: SessionNode | None, after: int
    ) -> HistoryMatch | None:
        """Find an earlier group whose history is the beginning of this request's history. A group's
        history does not include the group's answer. Return the match with the longest beginning, or
        None if no group matches. The last message of the beginning must have an index above
        `after`.

        If `session` is None, the match must fulfil three more conditions:

        * The message after the beginning is an answer. The app has then probably reworded the
          answer that the group served.
        * No other request continues the group's answer.
        * All groups that fulfil these conditions belong to one session.
        """
        messages = request.history.messages
        by_history = self._index.by_history
        for at in range(len(messages) - 2, after, -1):
            if not by_history.has(messages[at].history_key):
                continue
            groups = self._possible(by_history.latest(messages[at].history_key), request, session)
            if session is None:
                is_answered = messages[at + 1].role == "assistant"
                groups = [group for group in groups if is_answered and not group.continuations]
                if len({group.session.id for group in groups}) > 1:
                    return None
            if groups:
                return HistoryMatch(groups[0], at)
        return None

    def _failed_before(self, request: IncomingRequest) -> GroupNode | None:
        """Return the earlier group that this request retries, or None. Such a group has the same
        history and got no answer.

        Only a request that the client's library marks as a retry can have such a group. Without the
        mark, a request with the same text may come from another user.
        """
        if not request.hints.is_retry:
            return None
        for group in self._index.by_history.latest(request.history.key):
            is_late = request.received_at - group.received_at > RETRY_WINDOW_S
            is_same = group.size == request.size and not (is_late or group.is_repeated)
            is_unserved = group.status is not GroupStatus.SERVED
            if is_same and is_unserved and _is_possible(group, request):
                return group
        return None

    def _distinctive_answer(
        self, request: IncomingRequest, within: SessionNode | None
    ) -> HistoryMatch | None:
        """Find the last answer in the request's history that is distinctive (long, or with tool
        calls) and was served in exactly one session. Return the match with this answer, or None if
        there is no such answer."""
        messages = request.history.messages
        for at in range(len(messages) - 1, -1, -1):
            if messages[at].is_distinctive:
                groups = self._index.by_message.latest((request.scope, messages[at].key))
                possible = self._possible(groups, request, within)
                if len({group.session.id for group in possible}) == 1:
                    return HistoryMatch(possible[0], at)
        return None

    def _recent(self, request: IncomingRequest) -> Iterator[SessionNode]:
        """Yield the recently used sessions that may belong to the request's API key and user. The
        most recently used session comes first."""
        for session in islice(reversed(self._index.sessions.values()), MAX_RECENT_SESSIONS):
            if session.scope == request.scope and _is_same_user(session, request.hints):
                yield session

    def _quoted(self, request: IncomingRequest) -> SessionNode | None:
        """Return the session that has a question quoted in the request's text. Return None if there
        is no such session.

        If there are several, prefer a session that has its last answer quoted too.
        """
        text = padded(request.history.user_text)
        best: tuple[int, SessionNode] | None = None
        for session in self._recent(request):
            questions = {session.first_question, session.last_question} - {""}
            score = sum(quotes(text, question) for question in questions)
            score += bool(score) and 2 * quotes(text, session.last_answer)
            if score and (best is None or score > best[0]):
                best = score, session
        return best[1] if best else None

    def _possible(
        self, groups: Iterator[GroupNode], request: IncomingRequest, within: SessionNode | None
    ) -> list[GroupNode]:
        return [
            group
            for group in groups
            if _is_possible(group, request) and (within is None or group.session is within)
        ]


def padded(text: str) -> str:
    """Return the beginning of a text with a line break before and after it. The function `quotes`
    expects texts in this form.

    The beginning has at most MAX_QUOTING_CHARS characters. The text is searched once for each
    session, so the maximum length limits the search time.
    """
    return f"\n{text[:MAX_QUOTING_CHARS]}\n"


def quotes(text: str, excerpt: str) -> bool:
    """Return True if `text`, a result of `padded`, contains `excerpt` as whole lines. The name of a
    speaker and a colon may precede the first line of `excerpt`.

    >>> quotes(padded("Chat:\\nUSER: What is 2+2?"), "What is 2+2?")
    True
    >>> quotes(padded("USER: hide"), "hi")
    False
    """
    if not excerpt:
        return False
    after = "" if len(excerpt) == EXCERPT_CHARS else "\n"
    return any(f"{before}{excerpt}{after}" in text for before in ("\n", ": "))


def _is_possible(group: GroupNode, request: IncomingRequest) -> bool:
    return group.id != request.group_id and _is_same_user(group.session, request.hints)


def _is_same_user(session: SessionNode, hints: Hints) -> bool:
    """Return False if the users of the session and of the request are both known and differ. Return
    True otherwise."""
    return not (session.user and hints.user) or session.user == hints.user


def _likeness(group: GroupNode, request: IncomingRequest) -> tuple[bool, bool, bool]:
    """Return a key by which groups with equal histories are sorted. The group with the largest key
    is most likely the parent: the group whose answer the request continues.

    The key is a tuple of three booleans, the most important first:

    * The session and the request have equal cache keys.
    * The session and the request have equal system prompts.
    * No other request continues the group's answer yet.
    """
    cache_key = request.hints.cache_key
    return (
        bool(cache_key) and group.session.cache_key == cache_key,
        group.system_key == request.history.system_key,
        not group.continuations,
    )
