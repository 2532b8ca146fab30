"""Redaction: replace the matches of patterns in texts and in JSON documents.

A redacted text has no match of any pattern, where markers (`[redacted: NAME]`) separate texts.
Redacting it again changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import orjson

from fakevllm_adapters.formats.sse import SseDecoder, data_of
from fakevllm_adapters.privacy.patterns import MARKER, Pattern, marker

_MAX_PASSES = 8
"""Maximum number of searches of one text. A redaction may uncover another match beside it. After
this number of searches, the whole text is redacted, so that no text takes quadratic time."""
_MAX_DEPTH = 4
"""Maximum number of JSON texts inside of each other that are parsed, such as the arguments of a
tool call. The text below that is searched with its escapes replaced."""
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
UNREADABLE = "unreadable"
"""Name in the marker for a text that is redacted as a whole, because its match could not be cut
out."""
TOKENS = "tokens"
"""Name in the marker for a prompt of token ids, which cannot be searched."""
_TOKEN_FIELDS = frozenset(
    {
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "prompt_logprobs",
        "allowed_tokens",
        "top_logprobs",
    }
)
"""Fields of a request or an answer that spell the text in tokens."""
_NOT_TEXT = _TOKEN_FIELDS | {
    *("id", "object", "model", "system_fingerprint", "role", "finish_reason", "type")
}
"""Fields of an answer that repeat in each event, or whose texts the model has not sampled."""


class Redactor:
    """The redaction with some patterns. Without patterns, nothing is changed, and the object is
    false."""

    def __init__(self, patterns: Sequence[Pattern] = ()) -> None:
        self._patterns = tuple(patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    # --- texts

    def text(self, text: str) -> str:
        """Return the text with a marker in place of each match, also of matches that are written
        with JSON's escapes."""
        return self._text(text, _MAX_DEPTH)

    def finds(self, text: str) -> bool:
        """Return True if the text has a match of a pattern."""
        return bool(self._patterns) and self.text(text) != text

    def _text(self, text: str, depth: int) -> str:
        if not self._patterns or len(text) < 2:
            return text
        redacted = self._plain(text)
        if "\\" not in redacted:
            return redacted
        if depth > 0 and redacted.lstrip()[:1] in ("{", "[", '"'):
            try:
                value: Any = orjson.loads(redacted)
            except orjson.JSONDecodeError:
                pass
            else:
                changed = self._value(value, depth - 1)
                return redacted if changed == value else orjson.dumps(changed).decode()
        if self._has_match(_without_escapes(redacted)):
            return marker(UNREADABLE)
        return redacted

    def _plain(self, text: str) -> str:
        for _ in range(_MAX_PASSES):
            changed = self._pass(text)
            if changed == text:
                return text
            text = changed
        return text if self._pass(text) == text else marker(UNREADABLE)

    def _pass(self, text: str) -> str:
        """Replace the matches between the markers in `text`."""
        if "[redacted: " not in text:
            return self._replace(text)
        parts: list[str] = []
        end = 0
        for found in MARKER.finditer(text):
            parts += [self._replace(text[end : found.start()]), found.group()]
            end = found.end()
        return "".join([*parts, self._replace(text[end:])])

    def _replace(self, text: str) -> str:
        spans = self._spans(text)
        if not spans:
            return text
        parts: list[str] = []
        end = 0
        for start, stop, name in spans:
            parts += [text[end:start], marker(name)]
            end = stop
        return "".join([*parts, text[end:]])

    def _spans(self, text: str) -> list[tuple[int, int, str]]:
        """Return the matches of all patterns, from left to right. Matches that overlap are one
        match, with the name of the first one."""
        found = sorted(
            (start, end, pattern.name)
            for pattern in self._patterns
            for start, end in pattern.spans(text)
        )
        merged: list[tuple[int, int, str]] = []
        for start, end, name in found:
            if merged and start < merged[-1][1]:
                first, last, known = merged[-1]
                merged[-1] = (first, max(last, end), known)
            else:
                merged.append((start, end, name))
        return merged

    def _has_match(self, text: str) -> bool:
        return any(self._spans(part) for part in MARKER.split(text))

    # --- JSON

    def value(self, value: Any) -> Any:
        """Return a parsed JSON value with its strings, keys and numbers redacted. If nothing
        matches, the result equals `value`. If something matches, fields with the tokens of a text
        are emptied."""
        if not self._patterns:
            return value
        changed = self._value(value, _MAX_DEPTH)
        return value if changed == value else _without_tokens(changed)

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(value, depth)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | float):
            return self._plain(str(value)) if self._has_match(str(value)) else value
        if isinstance(value, dict):
            return {
                self._text(key, depth): (
                    marker(TOKENS)
                    if key == "prompt" and _has_token_ids(item)
                    else self._value(item, depth)
                )
                for key, item in cast("dict[str, Any]", value).items()
            }
        if isinstance(value, list | tuple):
            items = list(cast("Sequence[Any]", value))
            if items and isinstance(items[0], int | float):
                return self._numbers(items)
            return self._across([self._value(item, depth) for item in items])
        return value

    def _numbers(self, items: list[Any]) -> list[Any]:
        # Numbers below this size have too few digits for a card. Lists of token ids are long.
        is_large = any(isinstance(item, int) and item >= 10**11 for item in items)
        return [self._value(item, 0) for item in items] if is_large else items

    def _across(self, items: list[Any]) -> list[Any]:
        """Redact matches that begin in one part of a message's content and end in another. An
        engine joins the parts without a separator or with a line break."""
        texts = {place: text for place, item in enumerate(items) if (text := _part_text(item))}
        if len(texts) < 2:
            return items
        parts = self._cut_parts(list(texts.values()))
        changed = list(items)
        for place, text in zip(texts, parts, strict=True):
            changed[place] = _with_part_text(items[place], text)
        return changed

    def _cut_parts(self, parts: list[str]) -> list[str]:
        for _ in range(_MAX_PASSES):
            before = parts
            for separator in ("", "\n"):
                spans = self._spans_between_markers(separator.join(parts))
                spans = [span for span in spans if _crosses(span, parts, separator)]
                if spans:
                    parts = [self._plain(part) for part in _cut_out(parts, separator, spans)]
            if parts == before:
                return parts
        return [marker(UNREADABLE)] * len(parts)

    def _spans_between_markers(self, text: str) -> list[tuple[int, int, str]]:
        spans: list[tuple[int, int, str]] = []
        begin = 0
        for end, after in [*(found.span() for found in MARKER.finditer(text)), (len(text), 0)]:
            own = self._spans(text[begin:end])
            spans += [(begin + start, begin + stop, name) for start, stop, name in own]
            begin = after
        return spans

    # --- documents

    def json_text(self, text: str) -> str:
        """Return the text of a JSON document, redacted. If nothing matches, the text is returned
        unchanged. A text that is not JSON is redacted as text."""
        if not self._patterns:
            return text
        try:
            value: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            return self.text(text)
        changed = self.value(value)
        # A repeated key hides its first value from the parser, and not from a reader of the file.
        if changed == value and _has_repeated_key(text):
            return orjson.dumps(value).decode()
        return text if changed == value else orjson.dumps(changed).decode()

    def finds_in_body(self, raw: bytes) -> bool:
        """Return True if a request body or an answer has a match. The body is JSON, a stream of
        events, or text. The texts of the events are joined before they are searched."""
        if not self._patterns:
            return False
        text = raw.decode(errors="replace")
        if text.lstrip()[:1] in ("{", "["):
            return self.json_text(text) != text
        answer = AnswerTexts()
        answer.add_answer(raw)
        return self.finds(text) or self.finds_any(answer.texts)

    def finds_any(self, texts: Iterable[str]) -> bool:
        """Return True if one of the texts has a match."""
        return any(self.finds(text) for text in texts)


OFF = Redactor()
"""The redactor without patterns."""


class AnswerTexts:
    """The texts of one answer, which may arrive in many events. Texts of the same field are joined.

    >>> answer = AnswerTexts()
    >>> for text in ("a@", "b.de"):
    ...     answer.add({"choices": [{"index": 0, "delta": {"content": text}}]})
    >>> answer.texts
    ['a@b.de']
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], list[str]] = {}
        self._stops: list[str] = []

    def add_answer(self, raw: bytes) -> None:
        """Add a whole answer, a whole stream of events, or one event of a stream."""
        if raw.lstrip()[:5] != b"data:":
            return self._add_json(raw)
        for event in SseDecoder().feed(raw):
            data = data_of(event)
            if data is not None:
                self._add_json(data)

    def _add_json(self, raw: bytes) -> None:
        try:
            self.add(orjson.loads(raw))
        except orjson.JSONDecodeError:
            self._parts.setdefault((), []).append(raw.decode(errors="replace"))

    def add(self, value: Any, path: tuple[str, ...] = ()) -> None:
        """Add the texts of a parsed answer, or of one parsed event."""
        if isinstance(value, str):
            self._parts.setdefault(path, []).append(value)
        elif isinstance(value, dict):
            for name, item in cast("dict[str, Any]", value).items():
                if name == "stop_reason" and isinstance(item, str):
                    self._stops.append(item)
                elif name not in _NOT_TEXT and isinstance(item, str | dict | list):
                    self.add(item, (*path, name))
        elif isinstance(value, list):
            for place, item in enumerate(cast("list[Any]", value)):
                index = (
                    cast("dict[str, Any]", item).get("index") if isinstance(item, dict) else None
                )
                self.add(item, (*path, str(place if index is None else index)))

    @property
    def texts(self) -> list[str]:
        """The texts of the answer. A stop string, which an engine cuts off and whose tokens it has
        sampled, is added to each text once more."""
        texts = ["".join(parts) for parts in self._parts.values()]
        return [*texts, *(text + stop for stop in self._stops for text in texts)]


def _without_escapes(text: str) -> str:
    """Return the text with the escapes of JSON strings replaced by their characters."""

    def replace(found: re.Match[str]) -> str:
        if found[1] is not None:
            return chr(int(found[1], 16))
        return _CONTROL_ESCAPES.get(found[2], found[2])

    return _ESCAPE.sub(replace, text)


def _without_tokens(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: None if name in _TOKEN_FIELDS else _without_tokens(item)
            for name, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_without_tokens(item) for item in cast("list[Any]", value)]
    return value


def _has_repeated_key(text: str) -> bool:
    """Return True if an object of a JSON text has a key twice."""
    is_repeated = False

    def check(pairs: list[tuple[str, Any]]) -> None:
        nonlocal is_repeated
        is_repeated = is_repeated or len(dict(pairs)) < len(pairs)

    try:
        json.loads(text, object_pairs_hook=check)
    except (ValueError, RecursionError):
        return True
    return is_repeated


def _has_token_ids(prompt: Any) -> bool:
    """Return True if a prompt, or one of several prompts, is a list of token ids."""
    items = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    return any(isinstance(item, int | list) for item in items)


def _part_text(item: Any) -> str | None:
    """Return the text of one part of a message's content, or None if the part has no text."""
    if isinstance(item, str):
        return item
    text: object = cast("dict[str, Any]", item).get("text") if isinstance(item, dict) else None
    return text if isinstance(text, str) else None


def _with_part_text(item: Any, text: str) -> Any:
    return text if isinstance(item, str) else cast("dict[str, Any]", item) | {"text": text}


def _starts(parts: Sequence[str], separator: str) -> list[int]:
    return [0, *accumulate(len(part) + len(separator) for part in parts)][:-1]


def _crosses(span: tuple[int, int, str], parts: Sequence[str], separator: str) -> bool:
    return any(span[0] < start < span[1] for start in _starts(parts, separator)[1:])


def _cut_out(
    parts: Sequence[str], separator: str, spans: Sequence[tuple[int, int, str]]
) -> list[str]:
    """Return the parts without the characters of the spans, which count in the joined text. The
    first part of a span gets its marker."""
    cut: list[str] = []
    for part, begin in zip(parts, _starts(parts, separator), strict=True):
        text = part
        for start, end, name in reversed(spans):
            first, last = max(start - begin, 0), min(end - begin, len(part))
            if first < last:
                text = text[:first] + (marker(name) if start >= begin else "") + text[last:]
        cut.append(text)
    return cut
