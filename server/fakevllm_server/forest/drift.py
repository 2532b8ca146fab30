"""Why a call of a session does not go on where an earlier one ended. Counting only: tokens are
never edited, a branch costs compute and nothing else.

A call drifts where an app, a template or a parser changed what the model had seen or sampled
before it came back. The evidence is ids, then text where a decoder is given; where neither proves
a cause, it is `unknown`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm_server.forest.history import (
    Histories,
    Message,
    Vocabulary,
    histories,
    messages,
)
from fakevllm_server.forest.slices import first_difference


class Cause(StrEnum):
    """How a call stands to the earlier ones of its session."""

    FIRST = "first"
    """The session has no earlier call."""
    EXTENDS = "extends"
    """Its prompt begins with all an earlier call saw and sampled."""
    SIBLING = "sibling"
    """The prompt of another call of its group."""
    REGENERATED = "regenerated"
    """The prompt of an earlier call, of another group."""
    FORKED = "forked"
    """It extends an earlier call, and asks otherwise than another one that extends it too."""
    RETOKENISED = "retokenised"
    """The same text in other ids."""
    SPECIAL_TOKENS = "special_tokens"
    """The same text but for special tokens, as an end token that was sampled and then rewritten."""
    TRIMMED = "trimmed"
    """The same text but for white space at the edges of messages."""
    TOOL_CALL_RERENDERED = "tool_call_rerendered"
    """The same text but for how tool calls are spelt."""
    THINKING_STRIPPED = "thinking_stripped"
    """The same text but for thoughts, whose removal may come with any of the above."""
    COMPACTED = "compacted"
    """More messages of its history are gone than came in their place, and later ones are still
    there. A summary that leaves none of them is `unknown`: it could be another question."""
    APP_EDIT = "app_edit"
    """Other text where the app had asked something, and the rest of the history kept."""
    OTHER_SYSTEM_PROMPT = "other_system_prompt"
    """Its first message is another, some later ones are the same: tools or a clock in the system
    prompt changed, or a side call looks at the same conversation."""
    UNRELATED = "unrelated"
    """It shares no message with the calls that are nearest: a sub-agent, or a side call."""
    UNKNOWN = "unknown"
    NOT_READ = "not_read"
    """It does not extend an earlier one, and why was not looked at: there was too much to read."""


NO_DRIFT = frozenset(
    {Cause.FIRST, Cause.EXTENDS, Cause.SIBLING, Cause.REGENERATED, Cause.FORKED, Cause.UNRELATED}
)
"""Branches that are meant; every other cause is drift."""
MAX_COMPARED = 8
"""Of the earlier calls that share equally much with a prompt, so many of the newest are read as
text."""


@dataclass(frozen=True, slots=True)
class SessionCall:
    session: Hashable
    group: Hashable
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    returned: bool = True
    """Whether the app saw the response; only then can a later prompt contain it."""


def causes(
    calls: Sequence[SessionCall],
    vocabulary: Vocabulary | None = None,
    max_tokens: float = math.inf,
) -> list[Cause]:
    """One for each call, which must be in the order they were made. `max_tokens`: how many may be
    read as text; ids cost next to nothing."""
    reading = _Reading(Vocabulary() if vocabulary is None else vocabulary, max_tokens)
    sessions: dict[Hashable, _Session] = {}
    return [
        sessions.setdefault(call.session, _Session(reading)).cause_of_next(call) for call in calls
    ]


def drift_metrics(found: Sequence[Cause]) -> Mapping[str, float]:
    """`branch_<cause>` for every cause that occurred, and the share of drifted calls among those
    that came after another and were looked at; no share where there are none."""
    counts = Counter(found)
    later = len(found) - counts[Cause.FIRST] - counts[Cause.NOT_READ]
    drifted = sum(number for cause, number in counts.items() if cause not in NO_DRIFT)
    drifted -= counts[Cause.NOT_READ]
    branches = {f"branch_{cause}": float(number) for cause, number in sorted(counts.items())}
    return branches | ({"drift_rate": drifted / later} if later else {})


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A call the app saw the response of."""

    stored: array[int]
    """All it saw and sampled."""
    num_prompt: int

    def asked(self, message_start: int | None) -> int | None:
        """Where its prompt stops asking and begins the answer's message."""
        if message_start is None:
            return None
        starts = (at for at in reversed(range(self.num_prompt)) if self.stored[at] == message_start)
        return next(starts, None)


@dataclass(slots=True)
class _Reading:
    vocabulary: Vocabulary
    tokens_left: float

    def takes(self, num_tokens: int) -> bool:
        """Whether there is time to read so many."""
        if self.vocabulary.decode is not None:
            self.tokens_left -= num_tokens
        return self.tokens_left >= 0


@dataclass(slots=True)
class _Session:
    reading: _Reading
    asked: set[tuple[bytes, Hashable]] = field(default_factory=set[tuple[bytes, Hashable]])
    """Prompts, by the groups that asked them."""
    prompts: set[bytes] = field(default_factory=set[bytes])
    earlier: list[_Earlier] = field(default_factory=list[_Earlier])

    def cause_of_next(self, call: SessionCall) -> Cause:
        prompt = array("q", call.prompt_ids)
        key = prompt.tobytes()
        cause = self._of_prompts(key, call.group) or self._of_earlier(prompt)
        self.prompts.add(key)
        self.asked.add((key, call.group))
        if call.returned:
            self.earlier.append(_Earlier(prompt + array("q", call.response_ids), len(prompt)))
        return cause

    def _of_prompts(self, key: bytes, group: Hashable) -> Cause | None:
        if not self.prompts:
            return Cause.FIRST
        if (key, group) in self.asked:
            return Cause.SIBLING
        return Cause.REGENERATED if key in self.prompts else None

    def _of_earlier(self, prompt: array[int]) -> Cause:
        if not self.earlier:
            return Cause.UNKNOWN
        newest = self.earlier[-1].stored
        if prompt[: len(newest)] == newest and self._is_longest(newest):
            return Cause.EXTENDS
        shared = [_num_shared(one.stored, prompt) for one in self.earlier]
        most = max(shared)
        ended = [
            number
            for one, number in zip(self.earlier, shared, strict=True)
            if number == len(one.stored)
        ]
        if most in ended:
            return Cause.EXTENDS
        nearest = [one for one, number in zip(self.earlier, shared, strict=True) if number == most][
            -MAX_COMPARED:
        ][::-1]
        if not self.reading.takes(len(prompt) + sum(len(one.stored) for one in nearest)):
            return Cause.NOT_READ
        return self._by_text(nearest, prompt) or self._by_place(
            nearest[0], prompt, most, extends=bool(ended)
        )

    def _is_longest(self, stored: array[int]) -> bool:
        return all(len(one.stored) <= len(stored) for one in self.earlier)

    def _by_text(self, nearest: Sequence[_Earlier], prompt: array[int]) -> Cause | None:
        for one in nearest:
            texts = histories(one.stored, prompt, self.reading.vocabulary)
            cause = None if texts is None else _rung(texts)
            if cause is not None:
                return cause
        return None

    def _by_place(self, one: _Earlier, prompt: array[int], shared: int, *, extends: bool) -> Cause:
        """Of a prompt whose text is another one, or cannot be read. What was sampled, and what a
        template sets before it, may be rewritten in ways unknown here."""
        start = self.reading.vocabulary.message_start
        asked = one.asked(start)
        if start is None or asked is None or shared > asked:
            return Cause.UNKNOWN
        if extends:
            return Cause.FORKED
        if self.reading.vocabulary.decode is None:
            return Cause.UNKNOWN
        return _by_messages(messages(one.stored[:asked], start), messages(prompt, start)[:-1])


def _num_shared(one: array[int], other: array[int]) -> int:
    shorter = min(len(one), len(other))
    return first_difference(one, other, 0, shorter) if shorter else 0


def _rung(texts: Histories) -> Cause | None:
    """The first that holds: the least that must have been changed."""
    ladder = {
        Cause.RETOKENISED: texts.same_text,
        Cause.SPECIAL_TOKENS: texts.same_but_special_tokens,
        Cause.TRIMMED: texts.same_but_white_space,
        Cause.TOOL_CALL_RERENDERED: texts.same_but_tool_calls,
        Cause.THINKING_STRIPPED: texts.same_but_thoughts,
    }
    return next((cause for cause, holds in ladder.items() if holds()), None)


def _by_messages(old: Sequence[Message], new: Sequence[Message]) -> Cause:
    """Of histories that differ in something asked."""
    pairs = enumerate(zip(old, new, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(old), len(new)))
    gone, come = old[same:], new[same:]
    kept = set(gone) & set(come)
    if kept and not same:
        return Cause.OTHER_SYSTEM_PROMPT
    if kept:
        num_lost = sum(message not in kept for message in gone)
        num_put_in = next(at for at, message in enumerate(come) if message in kept)
        return Cause.COMPACTED if num_lost > num_put_in else Cause.APP_EDIT
    if same >= 2:
        return Cause.APP_EDIT
    # Behind one shared message, its system prompt, a first question may be edited or summarised.
    return Cause.UNKNOWN if same else Cause.UNRELATED
