"""Which session a request belongs to, and which answer it goes on from. Looks, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from fakevllm.sessions.hints import Hints
from fakevllm.sessions.index import EXCERPT_CHARS, Group, Memory, Session, Standing
from fakevllm.sessions.types import Asked, Evidence

RETRY_WINDOW_S = 600.0
"""Within which libraries send a request again."""
NUM_RECENT = 500
"""Sessions that are looked through where only a quote or a cache key can tell."""
MAX_QUOTING_CHARS = 20_000
"""Of a text that may quote a session."""


class Hit(NamedTuple):
    group: Group
    at: int
    """Where in the history it ends: at its answer, or at what it asked."""


class Found(NamedTuple):
    session: Session | None
    evidence: Evidence
    parent: Group | None = None
    base: Hit | None = None
    """The last group whose turn the history passes through."""


class Finder:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def find(self, asked: Asked, named: Session | None) -> Found:
        """`named`: the session that the request names, if it is known."""
        is_named = asked.hints.session is not None
        issued, evidence = self._issued(asked)
        within = named
        if is_named:
            evidence = Evidence.HEADER if asked.hints.is_header else Evidence.BODY
        elif issued is not None:
            within = issued.group.session
        elif (failed := self._failed(asked)) is not None:
            within, evidence = failed.session, Evidence.RETRY
        hit = self._answered(asked, within)
        if issued is not None and (within is None or issued.group.session is within):
            hit = issued if hit is None or issued.at > hit.at else hit
        if is_named and named is None:  # a new session; with the history of another it is a fork
            return Found(None, evidence, hit.group if hit else None, hit)
        found = self._with(asked, hit, within, evidence)
        return found or self._told_otherwise(asked, within, evidence)

    def _with(
        self, asked: Asked, hit: Hit | None, within: Session | None, evidence: Evidence
    ) -> Found | None:
        """What history and answers tell."""
        session = hit.group.session if hit else within
        if hit is not None and evidence is Evidence.NONE:
            evidence = Evidence.PREFIX
        passed = self._passed(asked, session, hit.at if hit else -1)
        if passed is not None:
            session = passed.group.session
            evidence = Evidence.QUESTION if evidence is Evidence.NONE else evidence
            is_answered = asked.history.said[passed.at + 1].role == "assistant"
            if passed.group.standing is Standing.SERVED and is_answered:
                return Found(session, evidence, passed.group, passed)
        if hit is None and passed is None:
            return None
        return Found(session, evidence, hit.group if hit else None, passed or hit)

    def _told_otherwise(self, asked: Asked, within: Session | None, evidence: Evidence) -> Found:
        said = self._said(asked, within)
        if said is not None:
            is_known = evidence is not Evidence.NONE
            found = evidence if is_known else Evidence.ANSWER
            return Found(said.group.session, found, said.group, said)
        if within is not None:
            return Found(within, evidence)
        if asked.hints.cache_key and asked.history.has_answers:
            alike = [one for one in self._recent(asked) if one.cache_key == asked.hints.cache_key]
            if len(alike) == 1:
                return Found(alike[0], Evidence.CACHE_KEY)
        quoted = self._quoted(asked) if asked.is_side else None
        return Found(quoted, Evidence.QUOTE) if quoted is not None else Found(None, Evidence.NONE)

    def _issued(self, asked: Asked) -> tuple[Hit | None, Evidence]:
        """The last of our answers that the request names, by a response's or a call's id."""
        scope, history = asked.scope, asked.history
        if asked.hints.answer is not None:
            for group in self._memory.responses.latest((scope, asked.hints.answer)):
                answers = [at for at, one in enumerate(history.said) if one.role == "assistant"]
                return Hit(group, answers[-1] if answers else -1), Evidence.RESPONSE_ID
        for at in range(len(history.said) - 1, -1, -1):
            for call_id in history.said[at].call_ids:
                groups = list(self._memory.calls.latest((scope, call_id)))
                if len({group.session.id for group in groups}) == 1:  # some engines count calls
                    return Hit(groups[0], at), Evidence.TOOL_CALL_ID
        return None, Evidence.NONE

    def _answered(self, asked: Asked, within: Session | None) -> Hit | None:
        """The longest beginning that ends in an answer of ours."""
        said = asked.history.said
        for at in range(len(said) - 1, -1, -1):
            if not self._memory.answered.has(said[at].end):
                continue
            if at == len(said) - 1 and said[at].role != "assistant":
                continue  # an empty answer's key is that of its question
            fitting = self._fitting(self._memory.answered.latest(said[at].end), asked, within)
            if fitting:
                return Hit(max(fitting, key=lambda group: _likeness(group, asked)), at)
        return None

    def _passed(self, asked: Asked, session: Session | None, after: int) -> Hit | None:
        """The longest beginning behind `after` that was asked as it is. Without a session the next
        message must be its answer, told differently, and no other session may be meant."""
        said = asked.history.said
        for at in range(len(said) - 2, after, -1):
            if not self._memory.asked.has(said[at].end):
                continue
            groups = self._fitting(self._memory.asked.latest(said[at].end), asked, session)
            if session is None:
                is_answered = said[at + 1].role == "assistant"
                groups = [group for group in groups if is_answered and not group.after]
                if len({group.session.id for group in groups}) > 1:
                    return None
            if groups:
                return Hit(groups[0], at)
        return None

    def _failed(self, asked: Asked) -> Group | None:
        """The request that a library says it sends again. Without its word it may as well be
        another user's, who happens to say the same."""
        if not asked.hints.is_retry:
            return None
        for group in self._memory.asked.latest(asked.history.end):
            is_late = asked.received_at - group.received_at > RETRY_WINDOW_S
            is_same = group.size == asked.size and not (is_late or group.is_repeated)
            if is_same and group.standing is not Standing.SERVED and _fits(group, asked):
                return group
        return None

    def _said(self, asked: Asked, within: Session | None) -> Hit | None:
        """The last answer of ours that only one session was given, wherever it stands."""
        said = asked.history.said
        for at in range(len(said) - 1, -1, -1):
            if said[at].is_telling:
                groups = self._memory.said.latest((asked.scope, said[at].key))
                fitting = self._fitting(groups, asked, within)
                if len({group.session.id for group in fitting}) == 1:
                    return Hit(fitting[0], at)
        return None

    def _recent(self, asked: Asked) -> Iterator[Session]:
        """Of the scope, the one that was of use latest first."""
        for session in islice(reversed(self._memory.sessions.values()), NUM_RECENT):
            if session.scope == asked.scope and _is_same_user(session, asked.hints):
                yield session

    def _quoted(self, asked: Asked) -> Session | None:
        """The session whose question the text quotes; better with its answer."""
        text = padded(asked.history.users_text)
        best: tuple[int, Session] | None = None
        for session in self._recent(asked):
            questions = {session.opening, session.question} - {""}
            score = sum(quotes(text, one) for one in questions)
            score += bool(score) and 2 * quotes(text, session.answer)
            if score and (best is None or score > best[0]):
                best = score, session
        return best[1] if best else None

    def _fitting(
        self, groups: Iterator[Group], asked: Asked, within: Session | None
    ) -> list[Group]:
        return [
            group
            for group in groups
            if _fits(group, asked) and (within is None or group.session is within)
        ]


def padded(text: str) -> str:
    """As `quotes` takes it. Of a long one the beginning: it is looked through once a session."""
    return f"\n{text[:MAX_QUOTING_CHARS]}\n"


def quotes(text: str, excerpt: str) -> bool:
    """Whether lines of a `padded` text are the excerpt, but for a name before them.

    >>> quotes(padded("Chat:\\nUSER: What is 2+2?"), "What is 2+2?")
    True
    >>> quotes(padded("USER: hide"), "hi")
    False
    """
    if not excerpt:
        return False
    after = "" if len(excerpt) == EXCERPT_CHARS else "\n"
    return any(f"{before}{excerpt}{after}" in text for before in ("\n", ": "))


def _fits(group: Group, asked: Asked) -> bool:
    return group.id != asked.group_id and _is_same_user(group.session, asked.hints)


def _is_same_user(session: Session, hints: Hints) -> bool:
    return not (session.user and hints.user) or session.user == hints.user


def _likeness(group: Group, asked: Asked) -> tuple[bool, bool, bool]:
    """Of groups whose histories are equal: the app's own prompt, and who has not gone on yet."""
    key = asked.hints.cache_key
    return (
        bool(key) and group.session.cache_key == key,
        group.system == asked.history.system,
        not group.after,
    )
