"""What a template or a parser does to the text of a conversation, undone for comparison.

A rung of the ladder says: the later text begins with the earlier one, once both are read this
way. Each rung forgives what the rungs before it forgive, and one thing more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

Decode = Callable[[Sequence[int]], str]

Message = tuple[int, ...]

_MARK = "\0"
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_ROLE = re.compile(rf"{_MARK}(\w+)\n")
_HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known of the tokenizer. The less, the more is `unknown`."""

    decode: Decode | None = None
    """Text of ids, special tokens included."""
    special_ids: Collection[int] = frozenset()
    """Those that mark turns and ends; not those of <think> and <tool_call>, which are text here."""
    message_start: int | None = None
    """The special id every message begins with."""


@dataclass(frozen=True, slots=True)
class Histories:
    """The texts of what was seen and sampled, and of what came later; in comparisons the latter
    goes on where the former ends."""

    earlier: str
    later: str
    special: Sequence[str]
    """Texts of special tokens."""

    def same_text(self) -> bool:
        return self._begins(lambda text: text)

    def same_but_special_tokens(self) -> bool:
        return self._begins(self._unmarked)

    def same_but_white_space(self) -> bool:
        return self._begins(lambda text: _trimmed(self._turns(text)))

    def same_but_tool_calls(self) -> bool:
        return self._begins(lambda text: _trimmed(_canonical_tools(self._turns(text))))

    def same_but_thoughts(self) -> bool:
        return self._begins(
            lambda text: _trimmed(_canonical_tools(_THOUGHT.sub(_MARK, self._turns(text))))
        )

    def _begins(self, read: Callable[[str], str]) -> bool:
        # A response may end inside a character, which the rest of the later text completes.
        return read(self.later).startswith(read(self.earlier.rstrip(_HALF_CHARACTER)))

    def _marked(self, text: str) -> str:
        if not self.special:
            return text
        return re.sub("|".join(map(re.escape, self.special)), _MARK, text)

    def _turns(self, text: str) -> str:
        """A role that is written as a line of text is a part of its own too."""
        return _ROLE.sub(rf"{_MARK}\1{_MARK}", self._marked(text))

    def _unmarked(self, text: str) -> str:
        return self._marked(text).replace(_MARK, "")


def histories(
    earlier: Sequence[int], later: Sequence[int], vocabulary: Vocabulary
) -> Histories | None:
    """None without a decoder."""
    decode = vocabulary.decode
    if decode is None:
        return None
    used = sorted({*earlier, *later}.intersection(vocabulary.special_ids))
    special = [text for text in (decode([token]) for token in used) if text]
    return Histories(decode(list(earlier)), decode(list(later)), special)


def messages(ids: Sequence[int], start: int) -> list[Message]:
    """Runs of ids from one message start to the next; what stands before the first is one too."""
    runs: list[Message] = []
    begin = 0
    for index in [*(index for index, token in enumerate(ids) if token == start), len(ids)]:
        if index > begin:
            runs.append(tuple(ids[begin:index]))
        begin = index
    return runs


def _trimmed(text: str) -> str:
    """Without white space at the edges of the parts between marks, and without the marks."""
    return "".join(part.strip() for part in text.split(_MARK))


def _canonical_tools(text: str) -> str:
    """Hermes' tool calls as sorted JSON, parts of their own; what is no JSON stays."""
    return _TOOL_CALL.sub(lambda match: _MARK + _canonical(match.group(1)) + _MARK, text)


def _canonical(body: str) -> str:
    try:
        call: Any = json.loads(body)
        if isinstance(call, dict):
            fields = cast(dict[str, Any], call)
            arguments = fields.get("arguments")
            if isinstance(arguments, str):
                call = fields | {"arguments": json.loads(arguments)}
        return json.dumps(call, sort_keys=True)
    except (ValueError, RecursionError):
        return body
