"""Redaction: replace the matches of patterns in texts and in JSON documents.

Each match is replaced by a marker (`[redacted: NAME]`). No text before, between or after the
markers of a redacted text matches a pattern. Redacting the text again changes nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
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
_MAX_NESTING = 100
"""Maximum number of lists and objects inside of each other, also across JSON texts, whose strings
are redacted one by one. Something deeper is redacted as a whole."""
LONG_BYTES = 2**18
"""Size of a body from which on another thread searches it. A search takes about 0.1 ms per KB."""
_NOT_SEARCHED = re.compile(
    MARKER.pattern
    + r"|data:[\w.+-]{1,60}/[\w.+-]{1,60}(?:;[\w.+=-]{1,60}){0,3};base64,[A-Za-z0-9+/=_-]{64,}",
    re.ASCII,
)
"""Markers, and the bytes of images, sounds and files."""
_MIN_LONG_NUMBER = 10**11
"""Smallest integer with as many digits as a card."""
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


_NamedSpan = tuple[int, int, str]
"""Start and end of a match in characters, and the name of its pattern."""


class _TooDeep(Exception):
    """The exception for JSON that is nested too deeply."""


class Redactor:
    """Replaces the matches of its patterns in texts and in JSON values by markers. A redactor
    without patterns changes nothing, and its truth value is False."""

    def __init__(self, patterns: Sequence[Pattern] = ()) -> None:
        self._patterns = tuple(patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    # --- texts

    def text(self, text: str) -> str:
        """Return the text with a marker in place of each match of a pattern. Matches that are
        written with JSON escapes are found too."""
        try:
            return self._text(text, _MAX_DEPTH)
        except _TooDeep:
            return self._unreadable(self._plain(text))

    def finds(self, text: str) -> bool:
        """Return True if the text has a match of a pattern."""
        return bool(self._patterns) and self.text(text) != text

    def _text(self, text: str, depth: int, level: int = 0) -> str:
        """Return a text, redacted. If the text is JSON, its strings may be JSON texts too: at most
        `depth` levels of JSON texts are parsed. `level` is the number of lists and objects around
        the text. Raises _TooDeep for lists and objects that are nested too deeply."""
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
                changed = self._value(value, depth - 1, level)
                return redacted if changed == value else orjson.dumps(changed).decode()
        return self._unreadable(redacted)

    def _unreadable(self, text: str) -> str:
        """Return a marker in place of the whole text if the text has a match after its JSON escapes
        are decoded. Otherwise return the text unchanged."""
        return marker(UNREADABLE) if self._has_match(_without_escapes(text)) else text

    def _plain(self, text: str) -> str:
        for _ in range(_MAX_PASSES):
            changed = self._pass(text)
            if changed == text:
                return text
            text = changed
        return text if self._pass(text) == text else marker(UNREADABLE)

    def _pass(self, text: str) -> str:
        """Search the text once, and replace the matches that are found. Markers and base64 data are
        not searched."""
        parts: list[str] = []
        end = 0
        for found in _NOT_SEARCHED.finditer(text):
            parts += [self._replace(text[end : found.start()]), found.group()]
            end = found.end()
        return "".join([*parts, self._replace(text[end:])]) if end else self._replace(text)

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

    def _spans(self, text: str) -> list[_NamedSpan]:
        """Return the matches of all patterns, from left to right. Overlapping matches are merged
        into one match, which has the pattern name of the first of these matches."""
        found = sorted(
            (start, end, pattern.name)
            for pattern in self._patterns
            for start, end in pattern.spans(text)
        )
        merged: list[_NamedSpan] = []
        for start, end, name in found:
            if merged and start < merged[-1][1]:
                first, last, known = merged[-1]
                merged[-1] = (first, max(last, end), known)
            else:
                merged.append((start, end, name))
        return merged

    def _has_match(self, text: str) -> bool:
        return any(self._spans(part) for part in _NOT_SEARCHED.split(text))

    # --- JSON

    def value(self, value: Any) -> Any:
        """Return a parsed JSON value with its strings, keys and integers redacted. A prompt of
        token ids cannot be searched, so it always counts as a match. If nothing matches, the result
        equals `value`. If something matches, fields with token ids or logprobs become None, because
        they spell out the redacted text. A value that is nested too deeply is replaced as a whole.
        """
        if not self._patterns:
            return value
        try:
            changed = self._value(value, _MAX_DEPTH, 0)
        except _TooDeep:
            return {marker(UNREADABLE): None} if isinstance(value, dict) else [marker(UNREADABLE)]
        return value if changed == value else _without_tokens(changed)

    def _value(self, value: Any, depth: int, level: int) -> Any:
        if isinstance(value, str):
            return self._text(value, depth, level)
        if isinstance(value, int) and abs(value) >= _MIN_LONG_NUMBER:
            return self._plain(str(value)) if self._has_match(str(value)) else value
        if not isinstance(value, dict | list | tuple):
            return value
        if level == _MAX_NESTING:
            raise _TooDeep
        if isinstance(value, dict):
            changed: dict[str, Any] = {}
            for key, item in cast("dict[str, Any]", value).items():
                is_tokens = key == "prompt" and _has_token_ids(item)
                changed[self._text(key, depth, level)] = (
                    marker(TOKENS) if is_tokens else self._value(item, depth, level + 1)
                )
            return changed
        items = cast("Sequence[Any]", value)
        return self._across([self._value(item, depth, level + 1) for item in items])

    def _across(self, items: list[Any]) -> list[Any]:
        """Redact matches that begin in one part of a message's content and end in a later part. An
        engine joins the parts without a separator or with a line break. A part is an object with a
        `type` and a `text`. Lists of anything else, such as strings, are not joined."""
        texts = {place: text for place, item in enumerate(items) if (text := _part_text(item))}
        if len(texts) < 2:
            return items
        parts = self._cut_parts(list(texts.values()))
        changed = list(items)
        for place, text in zip(texts, parts, strict=True):
            changed[place] = items[place] | {"text": text}
        return changed

    def _cut_parts(self, parts: list[str]) -> list[str]:
        for _ in range(_MAX_PASSES):
            before = parts
            for separator in ("", "\n"):
                starts = _starts(parts, separator)
                spans = self._spans_between_markers(separator.join(parts))
                spans = [span for span in spans if _crosses(span, starts)]
                if spans:
                    parts = [self._plain(part) for part in _cut_out(parts, starts, spans)]
            if parts == before:
                return parts
        return [marker(UNREADABLE)] * len(parts)

    def _spans_between_markers(self, text: str) -> list[_NamedSpan]:
        spans: list[_NamedSpan] = []
        begin = 0
        skipped = (found.span() for found in _NOT_SEARCHED.finditer(text))
        for end, after in [*skipped, (len(text), 0)]:
            own = self._spans(text[begin:end])
            spans += [(begin + start, begin + stop, name) for start, stop, name in own]
            begin = after
        return spans

    # --- documents

    def json_text(self, text: str) -> str:
        """Return the text of a JSON document, redacted. If nothing matches, the text is returned
        unchanged, unless an object has a key twice. In this case, only the last value of the key is
        kept. A text that is not JSON is redacted as plain text."""
        if not self._patterns:
            return text
        try:
            value: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            return self.text(text)
        try:
            changed = self._value(value, _MAX_DEPTH, 0)
        except _TooDeep:
            has_match = self._plain(text) != text or self._has_match(_without_escapes(text))
            return f'"{marker(UNREADABLE)}"' if has_match else text
        # A repeated key hides its first value from the parser, and not from a reader of the file.
        if changed == value and _has_repeated_key(text):
            return orjson.dumps(value).decode()
        return text if changed == value else orjson.dumps(_without_tokens(changed)).decode()

    def finds_in_body(self, raw: bytes) -> bool:
        """Return True if a request body or an answer has a match of a pattern. The body is JSON, a
        stream of events, or text. The texts of the events are joined before they are searched."""
        if not self._patterns:
            return False
        text = raw.decode(errors="replace")
        if text.lstrip()[:1] in ("{", "["):
            return self.json_text(text) != text
        answer = AnswerTexts()
        answer.add_answer(raw)
        return self.finds(text) or self.finds_any(answer.texts)

    def continued(self, end: str, text: str) -> str:
        """Return `text` without the rest of each match that begins in the preceding text. `end` is
        the end of the preceding text, which is redacted already."""
        if not self._patterns or not end or not text:
            return text
        return self._cut_parts([end, text])[1]

    def finds_continued(self, ends: Iterable[str], texts: Sequence[str]) -> bool:
        """Put each of `ends` in front of each of `texts`. Return True if one of the resulting texts
        has a match of a pattern. `ends` are the last characters of the prompts that the texts may
        continue. If `ends` is empty, search only the texts."""
        before = list(ends) or [""]
        return any(self.finds(end + text) for text in texts for end in before)

    def finds_any(self, texts: Iterable[str]) -> bool:
        """Return True if one of the texts has a match of a pattern."""
        return any(self.finds(text) for text in texts)


OFF = Redactor()
"""The redactor without patterns."""


class AnswerTexts:
    """The texts of one answer. The answer may arrive in many events. The pieces of one field are
    joined to one text.

    >>> answer = AnswerTexts()
    >>> for text in ("a@", "b.de"):
    ...     answer.add({"choices": [{"index": 0, "delta": {"content": text}}]})
    >>> answer.texts
    ['a@b.de']
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], list[str]] = {}
        self._stops: list[str] = []
        self._num_chars = 0

    @property
    def is_long(self) -> bool:
        """True if the answer's texts are so long that a search would block the event loop."""
        return self._num_chars >= LONG_BYTES

    def add_answer(self, raw: bytes) -> None:
        """Add the texts in the bytes `raw` to the texts of this answer. `raw` is a whole answer, a
        whole stream of events, or one event of a stream."""
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

    def add(self, value: Any) -> None:
        """Add the texts in `value` to the texts of this answer. `value` is a whole answer, or one
        event of a stream, parsed from JSON."""
        found: list[tuple[tuple[str, ...], Any]] = [((), value)]
        while found:  # not recursive, because an answer may be nested deeply
            path, item = found.pop()
            if isinstance(item, str):
                self._parts.setdefault(path, []).append(item)
                self._num_chars += len(item)
            elif isinstance(item, dict):
                found += self._fields(path, cast("dict[str, Any]", item))
            elif isinstance(item, list):
                items = enumerate(cast("list[Any]", item))
                found += (((*path, _index(place, one)), one) for place, one in items)

    def _fields(
        self, path: tuple[str, ...], item: dict[str, Any]
    ) -> Iterable[tuple[tuple[str, ...], Any]]:
        for name, value in item.items():
            if name == "stop_reason" and isinstance(value, str):
                self._stops.append(value)
            elif name not in _NOT_TEXT and isinstance(value, str | dict | list):
                yield (*path, name), value

    @property
    def texts(self) -> list[str]:
        """The texts of the answer. An engine leaves out a stop string, although the model has
        sampled it. Therefore each text is added once more with the stop string at its end."""
        texts = ["".join(parts) for parts in self._parts.values()]
        return [*texts, *(text + stop for stop in self._stops for text in texts)]


def _without_escapes(text: str) -> str:
    """Return the text with its JSON escapes decoded."""

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


def _index(place: int, item: Any) -> str:
    """Return the field `index` of a list item. Without this field, return the item's place in the
    list."""
    index: Any = cast("dict[str, Any]", item).get("index") if isinstance(item, dict) else None
    return str(place if index is None else index)


def _part_text(item: Any) -> str | None:
    """Return the text of a text part in a message's content. Return None for any other item."""
    if not isinstance(item, dict):
        return None
    part = cast("dict[str, Any]", item)
    text: object = part.get("text")
    return text if isinstance(text, str) and isinstance(part.get("type"), str) else None


def _starts(parts: Sequence[str], separator: str) -> list[int]:
    return [0, *accumulate(len(part) + len(separator) for part in parts)][:-1]


def _crosses(span: _NamedSpan, starts: Sequence[int]) -> bool:
    """Return True if a match begins in one part of the joined text and ends in a later part."""
    after = bisect_right(starts, span[0])
    return after < len(starts) and starts[after] < span[1]


def _cut_out(parts: Sequence[str], starts: Sequence[int], spans: Sequence[_NamedSpan]) -> list[str]:
    """Return the parts without the matches in `spans`. A span is (start, end, name of the pattern).
    The spans are sorted, and their positions refer to the joined text of all parts. The marker that
    replaces a match is put into the part in which the match begins."""
    ends = [end for _, end, _ in spans]
    cut: list[str] = []
    for part, begin in zip(parts, starts, strict=True):
        kept: list[str] = []
        done = 0
        for start, end, name in (spans[at] for at in range(bisect_right(ends, begin), len(spans))):
            if start >= begin + len(part):
                break
            kept += [part[done : max(start - begin, 0)], marker(name) if start >= begin else ""]
            done = min(end - begin, len(part))
        cut.append("".join([*kept, part[done:]]))
    return cut
