"""From an answer's text, as it comes, to what a stream's deltas say: content, or calls of tools.
Pure.

Three ways to read, by what the request asked: plain text, text in which Hermes calls may stand,
and an answer that a forced tool holds to JSON. Each reads a whole answer, too.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Protocol

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_adapters.vllm_compat.chat_response import new_tool_call_id
from fakevllm_server.backends.http.text_stream import ToolScanner, split_tool_calls

Json = dict[str, Any]

_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')


class Said(NamedTuple):
    """A whole answer."""

    content: str | None
    calls: list[Json]


class Reader(Protocol):
    """Of one choice."""

    def push(self, text: str) -> list[Json]:
        """The deltas that `text` makes certain."""
        ...

    def flush(self) -> list[Json]:
        """The deltas that only the end makes certain."""
        ...

    @property
    def called(self) -> bool:
        """Whether a delta so far called a tool."""
        ...

    def whole(self, text: str) -> Said: ...


def reader_of(request: ChatRequest) -> Reader:
    """A new one, for one choice."""
    if not request.offers_tools:
        return PlainReader()
    if (name := request.named_tool) is not None:
        return NamedReader(name)
    reader = RequiredReader() if request.tool_choice == "required" else HermesReader()
    return reader if request.parallel_tool_calls else FirstCallReader(reader)


class PlainReader:
    called = False

    def push(self, text: str) -> list[Json]:
        return [{"content": text}] if text else []

    def flush(self) -> list[Json]:
        return []

    def whole(self, text: str) -> Said:
        return Said(text, [])


class HermesReader:
    """`<tool_call>{…}</tool_call>` after any text; a call is told once it is whole."""

    def __init__(self) -> None:
        self._scanner = ToolScanner()
        self.called = False

    def push(self, text: str) -> list[Json]:
        passed = self._scanner.push(text)
        return [{"content": passed}] if passed else []

    def flush(self) -> list[Json]:
        rest, calls = split_tool_calls(self._scanner.flush())
        self.called = bool(calls)
        deltas: list[Json] = [{"content": rest}] if rest else []
        for at, call in enumerate(calls):
            function = call["function"]
            deltas.append(_opening(at, function["name"], call["id"]))
            deltas.append(_arguments(at, function["arguments"]))
        return deltas

    def whole(self, text: str) -> Said:
        return Said(*split_tool_calls(text))


class FirstCallReader:
    """`parallel_tool_calls` false: whatever else is called is not told, as in vLLM."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def called(self) -> bool:
        return self._reader.called

    def push(self, text: str) -> list[Json]:
        return [delta for delta in self._reader.push(text) if _is_of_first(delta)]

    def flush(self) -> list[Json]:
        return [delta for delta in self._reader.flush() if _is_of_first(delta)]

    def whole(self, text: str) -> Said:
        said = self._reader.whole(text)
        return Said(said.content, said.calls[:1])


def _is_of_first(delta: Json) -> bool:
    return all(call["index"] == 0 for call in delta.get("tool_calls", ()))


class NamedReader:
    """All of the answer is the arguments of the one tool asked for by name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.called = False

    def push(self, text: str) -> list[Json]:
        if not text:
            return []
        opening = [] if self.called else [_opening(0, self._name)]
        self.called = True
        return [*opening, _arguments(0, text)]

    def flush(self) -> list[Json]:
        return []

    def whole(self, text: str) -> Said:
        return Said("", [_call(self._name, text)] if text.strip() else [])


class RequiredReader:
    """The answer is a JSON array of {"name": …, "parameters": …}, in this order.

    >>> reader = RequiredReader()
    >>> deltas = reader.push('[{"name": "add", "parameters": {"a": 1}}]')
    >>> [delta["tool_calls"][0]["function"] for delta in deltas]
    [{'name': 'add'}, {'arguments': '{"a": 1}'}]
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._head = ""
        """Of the present call, up to its parameters."""
        self._in_parameters = self._has_begun = False
        self._num_calls = 0

    @property
    def called(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[Json]:
        deltas: list[Json] = []
        passed = ""
        for character in text:
            was_in_parameters = self._in_parameters
            passed += self._take(character)
            if was_in_parameters and not self._in_parameters and passed:
                deltas.append(_arguments(self._num_calls - 1, passed))
                passed = ""
            elif self._in_parameters and not was_in_parameters:
                deltas.append(_opening(self._num_calls - 1, self._name()))
        if passed:
            deltas.append(_arguments(self._num_calls - 1, passed))
        return deltas

    def flush(self) -> list[Json]:
        return []

    def whole(self, text: str) -> Said:
        """An answer cut off before its end calls nothing, as in vLLM."""
        try:
            calls = [
                _call(call["name"], json.dumps(call["parameters"], ensure_ascii=False))
                for call in json.loads(text)
            ]
        except (ValueError, KeyError, TypeError, RecursionError):
            return Said("", [])
        return Said("", calls)

    def _take(self, character: str) -> str:
        """What of it belongs to arguments."""
        before = self._depth
        self._count(character)
        if self._in_parameters:
            if before == 2 and not self._in_string and (self._depth < 2 or character == ","):
                self._in_parameters = self._has_begun = False
                self._head = ""
                return ""
            self._has_begun = self._has_begun or not character.isspace()
            return character if self._has_begun else ""
        if before >= 2 or self._depth >= 2:
            self._head += character
        if before == 2 and character == ":" and not self._in_string:
            self._in_parameters = self._head[:-1].rstrip().endswith('"parameters"')
            self._num_calls += self._in_parameters
        return ""

    def _count(self, character: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "[{":
            self._depth += 1
        elif character in "]}":
            self._depth -= 1

    def _name(self) -> str:
        found = _NAME.search(self._head)
        return json.loads(found[1]) if found else ""


def _opening(index: int, name: str, id: str | None = None) -> Json:
    call: Json = {"id": id or new_tool_call_id(), "type": "function", "index": index}
    return {"content": None, "tool_calls": [call | {"function": {"name": name}}]}


def _arguments(index: int, text: str) -> Json:
    call: Json = {"index": index, "function": {"arguments": text}}
    return {"content": None, "tool_calls": [call]}


def _call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": new_tool_call_id(), "type": "function", "function": function}
