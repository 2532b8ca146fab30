"""From sampled tokens to the text an app reads: detokenising, stop strings, Hermes tool calls.
Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from fakevllm_adapters.vllm_compat.chat_response import new_tool_call_id

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_OPEN}\s*(.*?)\s*(?:{TOOL_CLOSE}|$)", re.DOTALL)


class Detokenizer:
    """Ids in, text out, holding back bytes that do not yet make a character.

    Decodes from the last settled place only, so a long answer costs linear time; a little context
    before it is
    decoded again because some tokenizers print a token differently at the start of a text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0
        self._settled = 0

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        self._ids.extend(ids)
        before = self._decode(self._ids[self._context : self._settled])
        after = self._decode(self._ids[self._context :])
        if after.endswith("\ufffd") and not last:
            return ""
        self._context, self._settled = self._settled, len(self._ids)
        return after[len(before) :]


class StopScanner:
    """Cuts a text at the first stop string, holding back what could still become one.

    >>> scanner = StopScanner(["END"])
    >>> scanner.push("abcE"), scanner.push("Nd"), scanner.flush()
    ('ab', 'cE', 'Nd')
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        """`shows_stop`: the text ends with the stop string instead of before it."""
        self._stops = [stop for stop in stops if stop]
        self._shows_stop = shows_stop
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._pending = ""
        self.hit: str | None = None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Not `is_armed`: this text passes, whatever it holds."""
        self._pending += text
        if not is_armed:
            return self.flush()
        found = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            end = at + len(self.hit) if self._shows_stop else at
            out, self._pending = self._pending[:end], ""
            return out
        keep = len(self._pending) - self._hold
        if keep <= 0:
            return ""
        out, self._pending = self._pending[:keep], self._pending[keep:]
        return out

    def flush(self) -> str:
        out, self._pending = self._pending, ""
        return out


class ToolScanner:
    """Lets text through until a tool call may begin; the rest waits for `split_tool_calls`."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        self._held += text
        at = self._held.find(TOOL_OPEN)
        if at < 0:
            at = len(self._held) - _overlap(self._held, TOOL_OPEN)
        out, self._held = self._held[:at], self._held[at:]
        return out

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


def split_tool_calls(text: str) -> tuple[str | None, list[Json]]:
    """The text before the first call, and the calls. A call that does not parse leaves the text as
    it was."""
    if TOOL_OPEN not in text:
        return text, []
    try:
        calls = [_tool_call(orjson.loads(found)) for found in _TOOL_CALL.findall(text)]
    except (ValueError, KeyError, TypeError):
        return text, []
    return text[: text.index(TOOL_OPEN)] or None, calls


def _tool_call(parsed: Json) -> Json:
    arguments = parsed.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": str(parsed["name"]), "arguments": text}
    return {"id": new_tool_call_id(), "type": "function", "function": function}


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
