"""Compare the texts of two calls, ignoring changes that chat templates and parsers make.

Each comparison normalizes both texts, and tests whether the later text begins with the earlier
text. Each comparison is more tolerant than the comparison before: it also ignores one more kind of
change.
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
    """Known properties of the tokenizer: how to decode ids, and which ids are special. If a
    property is not known, `find_causes` returns the cause `unknown` more often."""

    decode: Decode | None = None
    """Function from ids to text. The text includes special tokens."""
    special_ids: Collection[int] = frozenset()
    """Ids of the special tokens that mark messages and ends of texts. <think> and <tool_call> are
    not included, because they count as text."""
    message_start: int | None = None
    """The special id that begins every message."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts to compare: the text of an earlier call, and the text of a later call's prompt."""

    earlier: str
    """Prompt and response of the earlier call."""
    later: str
    """Prompt of the later call."""
    special: Sequence[str]
    """Texts of the special tokens that occur in the two texts."""

    def same_text(self) -> bool:
        return self._is_prefix(lambda text: text)

    def same_but_special_tokens(self) -> bool:
        return self._is_prefix(self._without_special_tokens)

    def same_but_white_space(self) -> bool:
        return self._is_prefix(lambda text: _strip_parts(self._mark_turns(text)))

    def same_but_tool_calls(self) -> bool:
        return self._is_prefix(
            lambda text: _strip_parts(_normalize_tool_calls(self._mark_turns(text)))
        )

    def same_but_thoughts(self) -> bool:
        return self._is_prefix(
            lambda text: _strip_parts(
                _normalize_tool_calls(_THOUGHT.sub(_MARK, self._mark_turns(text)))
            )
        )

    def _is_prefix(self, normalize: Callable[[str], str]) -> bool:
        # A response may end inside a character, which the later text has completely.
        earlier = self.earlier.rstrip(_HALF_CHARACTER)
        return normalize(self.later).startswith(normalize(earlier))

    def _mark_special_tokens(self, text: str) -> str:
        if not self.special:
            return text
        return re.sub("|".join(map(re.escape, self.special)), _MARK, text)

    def _mark_turns(self, text: str) -> str:
        """Replace each special token by a mark, a character that separates parts of the text. If a
        line with a role name follows a special token, also replace the line break after the role
        name by a mark."""
        return _ROLE.sub(rf"{_MARK}\1{_MARK}", self._mark_special_tokens(text))

    def _without_special_tokens(self, text: str) -> str:
        return self._mark_special_tokens(text).replace(_MARK, "")


def decode_pair(
    earlier: Sequence[int], later: Sequence[int], vocabulary: Vocabulary
) -> TextPair | None:
    """Decode two sequences of token ids, and return their texts as a TextPair. Return None if the
    vocabulary cannot decode ids."""
    decode = vocabulary.decode
    if decode is None:
        return None
    used = sorted({*earlier, *later}.intersection(vocabulary.special_ids))
    special = [text for text in (decode([token]) for token in used) if text]
    return TextPair(decode(list(earlier)), decode(list(later)), special)


def split_messages(ids: Sequence[int], start: int) -> list[Message]:
    """Split a sequence of token ids before each `start` id, and return the parts as messages. The
    ids before the first `start` id form a message too."""
    runs: list[Message] = []
    begin = 0
    for index in [*(index for index, token in enumerate(ids) if token == start), len(ids)]:
        if index > begin:
            runs.append(tuple(ids[begin:index]))
        begin = index
    return runs


def _strip_parts(text: str) -> str:
    """Strip white space from both ends of each part of the text, and join the parts without the
    marks that separate them."""
    return "".join(part.strip() for part in text.split(_MARK))


def _normalize_tool_calls(text: str) -> str:
    """Rewrite each tool call in Hermes format as JSON with sorted keys. Put a mark, which separates
    parts of the text, before and after this JSON. Keep all other text."""
    return _TOOL_CALL.sub(lambda match: _MARK + _normalize_json(match.group(1)) + _MARK, text)


def _normalize_json(body: str) -> str:
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
