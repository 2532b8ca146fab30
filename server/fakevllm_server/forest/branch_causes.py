"""Find out why the prompt of a call does not begin with all tokens of an earlier call.

A session is a conversation of an app, and its calls are the model calls of this conversation.
Normally a later call *extends* an earlier call: the later prompt begins with the prompt and the
response of the earlier call. Both calls then share these tokens in training. A later call *drifts*
if its prompt should repeat tokens of an earlier call, but some of the tokens have changed. An app,
a chat template or a parser may have changed them. Drift only costs additional compute.

The module first compares token ids. If the ids do not show the cause, and if the vocabulary can
decode ids, the module compares the texts. If the texts do not show the cause either, the cause is
`unknown`. This module only counts causes, and never changes tokens.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fakevllm_server.forest.call_text_comparison import (
    Message,
    TextPair,
    Vocabulary,
    decode_pair,
    split_messages,
)
from fakevllm_server.forest.consecutive_nodes import first_difference


class Cause(StrEnum):
    """The relation between a call's prompt and the earlier calls of the call's session. It says
    that the prompt extends an earlier call, or why the prompt does not."""

    FIRST = "first"
    """The session has no earlier call."""
    EXTENDS = "extends"
    """The prompt begins with the prompt and the response of an earlier call."""
    SIBLING = "sibling"
    """The prompt equals the prompt of an earlier call of the same group."""
    REGENERATED = "regenerated"
    """The prompt equals the prompt of an earlier call of another group."""
    FORKED = "forked"
    """The prompt begins with all tokens of an earlier call A, but another call has already extended
    A with a different question."""
    RETOKENISED = "retokenised"
    """The prompt begins with the text of an earlier call, but with other token ids."""
    SPECIAL_TOKENS = "special_tokens"
    """The prompt begins with the text of an earlier call, except for special tokens. For example, a
    sampled end token was replaced."""
    TRIMMED = "trimmed"
    """The prompt begins with the text of an earlier call, except for special tokens and for white
    space at the edges of messages."""
    TOOL_CALL_RERENDERED = "tool_call_rerendered"
    """The prompt begins with the text of an earlier call, except for the formatting of tool calls.
    Special tokens and white space may differ too."""
    THINKING_STRIPPED = "thinking_stripped"
    """The prompt begins with the text of an earlier call, except for reasoning (<think>). Special
    tokens, white space and the formatting of tool calls may differ too."""
    COMPACTED = "compacted"
    """Messages were removed, fewer messages were inserted in their place, and later messages were
    kept. If a summary replaces all messages, the cause is `unknown`, because the prompt could be
    another question."""
    APP_EDIT = "app_edit"
    """The app changed a message that it had sent in an earlier call, and kept the rest of the
    history."""
    OTHER_SYSTEM_PROMPT = "other_system_prompt"
    """The first message differs from that of an earlier call, and some later messages are equal.
    For example, tools or a clock in the system prompt changed, or a side call of the app contains
    the conversation."""
    UNRELATED = "unrelated"
    """The prompt shares no message with the most similar earlier call. It belongs to a sub-agent or
    to a side call of the app."""
    UNKNOWN = "unknown"
    NOT_READ = "not_read"
    """The prompt does not extend an earlier call. The cause was not examined, because the maximum
    number of tokens to compare as text was reached."""


NO_DRIFT = frozenset(
    {Cause.FIRST, Cause.EXTENDS, Cause.SIBLING, Cause.REGENERATED, Cause.FORKED, Cause.UNRELATED}
)
"""Causes that are intended; every other cause is drift."""
MAX_COMPARED = 8
"""Maximum number of earlier calls whose text is compared with a prompt. Only the calls that have
the longest common prefix with the prompt are compared. If there are too many such calls, the newest
are compared."""


@dataclass(frozen=True, slots=True)
class SessionCall:
    """One model call of a session (a conversation of an app), with the fields that `find_causes`
    reads."""

    session: Hashable
    group: Hashable
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    returned: bool = True
    """Whether the app received the response. A later prompt can contain only a received
    response."""


def find_causes(
    calls: Sequence[SessionCall],
    vocabulary: Vocabulary | None = None,
    max_tokens: float = math.inf,
) -> list[Cause]:
    """Return a Cause for each call. A Cause says that the call's prompt extends an earlier call of
    its session, or why the prompt does not. The calls of each session must be in the order in which
    they were made.

    Token ids are always compared, because this is cheap. `max_tokens` is the maximum total number
    of tokens that are decoded and compared as text. When this number is reached, each later call
    that needs a comparison of texts gets the cause `not_read`.
    """
    budget = _ReadBudget(Vocabulary() if vocabulary is None else vocabulary, max_tokens)
    sessions: dict[Hashable, _Session] = {}
    return [
        sessions.setdefault(call.session, _Session(budget)).cause_of_next(call) for call in calls
    ]


def drift_metrics(causes: Sequence[Cause]) -> Mapping[str, float]:
    """Return the metrics `branch_<cause>` and `drift_rate`.

    `branch_<cause>` is the number of calls with this cause. The metric is left out for causes that
    did not occur. `drift_rate` is the share of calls whose cause is unintended (not in NO_DRIFT).
    The first call of each session, and calls with the cause `not_read`, are left out of this share.
    If no other calls exist, there is no `drift_rate`.
    """
    counts = Counter(causes)
    later = len(causes) - counts[Cause.FIRST] - counts[Cause.NOT_READ]
    drifted = sum(number for cause, number in counts.items() if cause not in NO_DRIFT)
    drifted -= counts[Cause.NOT_READ]
    branches = {f"branch_{cause}": float(number) for cause, number in sorted(counts.items())}
    return branches | ({"drift_rate": drifted / later} if later else {})


@dataclass(frozen=True, slots=True)
class _EarlierCall:
    """An earlier call whose response the app received."""

    ids: array[int]
    """Token ids of the prompt, followed by those of the response."""
    num_prompt: int

    def answer_start(self, message_start: int | None) -> int | None:
        """Return the position at which the last message of the prompt begins. This message is only
        the beginning of the answer, written by the chat template. `message_start` is the token id
        that begins every message. Return None if `message_start` is None or does not occur."""
        if message_start is None:
            return None
        starts = (at for at in reversed(range(self.num_prompt)) if self.ids[at] == message_start)
        return next(starts, None)


@dataclass(slots=True)
class _ReadBudget:
    """A limit on the number of tokens that are decoded and compared as text. The object also holds
    the vocabulary that decodes the tokens."""

    vocabulary: Vocabulary
    tokens_left: float

    def spend(self, num_tokens: int) -> bool:
        """Subtract `num_tokens` from the number of tokens that may still be compared as text.
        Return False if the limit is exceeded. If the vocabulary cannot decode ids, no text is
        compared, so nothing is subtracted."""
        if self.vocabulary.decode is not None:
            self.tokens_left -= num_tokens
        return self.tokens_left >= 0


@dataclass(slots=True)
class _Session:
    """The calls of one session so far, with which the session's next call is compared."""

    budget: _ReadBudget
    group_prompts: set[tuple[bytes, Hashable]] = field(default_factory=set[tuple[bytes, Hashable]])
    """Prompts as bytes, each with the group of its call."""
    prompts: set[bytes] = field(default_factory=set[bytes])
    earlier: list[_EarlierCall] = field(default_factory=list[_EarlierCall])

    def cause_of_next(self, call: SessionCall) -> Cause:
        """Return the Cause of the session's next call `call`: how its prompt relates to the
        session's earlier calls. Then add `call` to these calls."""
        prompt = array("q", call.prompt_ids)
        key = prompt.tobytes()
        cause = self._cause_by_equal_prompt(key, call.group) or self._cause_by_earlier_calls(prompt)
        self.prompts.add(key)
        self.group_prompts.add((key, call.group))
        if call.returned:
            self.earlier.append(_EarlierCall(prompt + array("q", call.response_ids), len(prompt)))
        return cause

    def _cause_by_equal_prompt(self, key: bytes, group: Hashable) -> Cause | None:
        if not self.prompts:
            return Cause.FIRST
        if (key, group) in self.group_prompts:
            return Cause.SIBLING
        return Cause.REGENERATED if key in self.prompts else None

    def _cause_by_earlier_calls(self, prompt: array[int]) -> Cause:
        if not self.earlier:
            return Cause.UNKNOWN
        newest = self.earlier[-1].ids
        if prompt[: len(newest)] == newest and self._is_longest(newest):
            return Cause.EXTENDS
        shared = [_num_shared(call.ids, prompt) for call in self.earlier]
        most = max(shared)
        pairs = list(zip(self.earlier, shared, strict=True))
        extended_lengths = [number for call, number in pairs if number == len(call.ids)]
        if most in extended_lengths:
            return Cause.EXTENDS
        nearest = [call for call, number in pairs if number == most][-MAX_COMPARED:][::-1]
        if not self.budget.spend(len(prompt) + sum(len(call.ids) for call in nearest)):
            return Cause.NOT_READ
        return self._cause_by_text(nearest, prompt) or self._cause_by_messages(
            nearest[0], prompt, most, extends=bool(extended_lengths)
        )

    def _is_longest(self, ids: array[int]) -> bool:
        return all(len(call.ids) <= len(ids) for call in self.earlier)

    def _cause_by_text(self, nearest: Sequence[_EarlierCall], prompt: array[int]) -> Cause | None:
        for call in nearest:
            texts = decode_pair(call.ids, prompt, self.budget.vocabulary)
            cause = None if texts is None else _smallest_change(texts)
            if cause is not None:
                return cause
        return None

    def _cause_by_messages(
        self, call: _EarlierCall, prompt: array[int], shared: int, *, extends: bool
    ) -> Cause:
        """Compare the messages of `prompt` with the messages of the earlier call `call`, and return
        the Cause. Use this method if `_cause_by_text` found no Cause. The first `shared` tokens of
        `prompt` and `call` are equal. `extends` is true if `prompt` begins with all tokens of some
        shorter earlier call.

        The cause is `unknown` if the first difference is inside the answer of `call`, or in the
        template text that begins this answer.
        """
        start = self.budget.vocabulary.message_start
        answer_start = call.answer_start(start)
        if start is None or answer_start is None or shared > answer_start:
            return Cause.UNKNOWN
        if extends:
            return Cause.FORKED
        if self.budget.vocabulary.decode is None:
            return Cause.UNKNOWN
        return _compare_messages(
            split_messages(call.ids[:answer_start], start), split_messages(prompt, start)[:-1]
        )


def _num_shared(one: array[int], other: array[int]) -> int:
    shorter = min(len(one), len(other))
    return first_difference(one, other, 0, shorter) if shorter else 0


def _smallest_change(texts: TextPair) -> Cause | None:
    """Compare the two texts with increasing tolerance. The comparisons ignore, in this order:
    nothing, special tokens, white space, formatting of tool calls, and reasoning. Return the Cause
    of the first comparison that finds no difference, or None if all comparisons find a
    difference."""
    comparisons = {
        Cause.RETOKENISED: texts.same_text,
        Cause.SPECIAL_TOKENS: texts.same_but_special_tokens,
        Cause.TRIMMED: texts.same_but_white_space,
        Cause.TOOL_CALL_RERENDERED: texts.same_but_tool_calls,
        Cause.THINKING_STRIPPED: texts.same_but_thoughts,
    }
    return next((cause for cause, holds in comparisons.items() if holds()), None)


def _compare_messages(old: Sequence[Message], new: Sequence[Message]) -> Cause:
    """Return the Cause for a prompt that differs from the prompt of an earlier call. `old` has the
    messages of the earlier prompt, and `new` has the messages of the later prompt. The last message
    of each prompt is left out, because it is only the beginning of the answer."""
    pairs = enumerate(zip(old, new, strict=False))
    num_same = next((at for at, (one, other) in pairs if one != other), min(len(old), len(new)))
    old_rest, new_rest = old[num_same:], new[num_same:]
    kept = set(old_rest) & set(new_rest)
    if kept and not num_same:
        return Cause.OTHER_SYSTEM_PROMPT
    if kept:
        num_removed = sum(message not in kept for message in old_rest)
        num_inserted = next(at for at, message in enumerate(new_rest) if message in kept)
        return Cause.COMPACTED if num_removed > num_inserted else Cause.APP_EDIT
    if num_same >= 2:
        return Cause.APP_EDIT
    # After one shared message, the system prompt, the first question may be edited or summarized.
    return Cause.UNKNOWN if num_same else Cause.UNRELATED
