"""Parsers that extract tool calls from an answer's text.

The request determines the parser:

* no tools: plain text
* tools and `tool_choice` auto: text with tool calls in Hermes format
  (`<tool_call>{…}</tool_call>`)
* `tool_choice` required, or a named tool: an answer that a grammar restricts to JSON

A parser can read a whole answer at once. A parser can also read the text piece by piece while the
text is sampled. The parser then returns the deltas of the response stream.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Protocol, cast

import orjson

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_adapters.vllm_compat.chat_response import new_tool_call_id

Json = dict[str, Any]

TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_OPEN}\s*(.*?)\s*(?:{TOOL_CLOSE}|$)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')


class ParsedAnswer(NamedTuple):
    """The content and the tool calls of a whole answer."""

    content: str | None
    calls: list[Json]


class AnswerParser(Protocol):
    """A parser that extracts content and tool calls from the text of one choice."""

    def push(self, text: str) -> list[Json]:
        """Read the next piece of the text. Return the deltas of the response stream that are
        certain so far and have not been returned yet."""
        ...

    def flush(self) -> list[Json]:
        """Mark the end of the text. Return the deltas of the response stream that have not been
        returned yet."""
        ...

    @property
    def has_tool_call(self) -> bool:
        """Whether a delta of a tool call has been returned so far."""
        ...

    def parse_whole(self, text: str) -> ParsedAnswer:
        """Return the content and the tool calls of a whole answer. The result does not depend on
        text that was read with `push`."""
        ...


def create_parser(request: ChatRequest) -> AnswerParser:
    """Return a new parser for one choice of `request`."""
    if not request.offers_tools:
        return PlainTextParser()
    if (name := request.named_tool) is not None:
        return NamedToolParser(name)
    parser = RequiredToolParser() if request.tool_choice == "required" else HermesParser()
    return parser if request.parallel_tool_calls else FirstCallParser(parser)


class PlainTextParser:
    """Parser for answers without tool calls: all text is content."""

    has_tool_call = False

    def push(self, text: str) -> list[Json]:
        return [{"content": text}] if text else []

    def flush(self) -> list[Json]:
        return []

    def parse_whole(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text, [])


class HermesParser:
    """Parser for answers with text, followed by tool calls in Hermes format
    (`<tool_call>{…}</tool_call>`). In a stream, the deltas of the tool calls are returned at the
    end of the answer."""

    def __init__(self) -> None:
        self._held = ""
        """Text from the first position at which a tool call may begin."""
        self.has_tool_call = False

    def push(self, text: str) -> list[Json]:
        self._held += text
        at = self._held.find(TOOL_OPEN)
        if at < 0:
            at = len(self._held) - _overlap(self._held, TOOL_OPEN)
        content, self._held = self._held[:at], self._held[at:]
        return [{"content": content}] if content else []

    def flush(self) -> list[Json]:
        rest, calls = _split_tool_calls(self._held)
        self._held = ""
        self.has_tool_call = bool(calls)
        deltas: list[Json] = [{"content": rest}] if rest else []
        for at, call in enumerate(calls):
            function = call["function"]
            deltas.append(_name_delta(at, function["name"], call["id"]))
            deltas.append(_arguments_delta(at, function["arguments"]))
        return deltas

    def parse_whole(self, text: str) -> ParsedAnswer:
        return _split_tool_calls(text)


class FirstCallParser:
    """Parser for requests with `parallel_tool_calls` false. As in vLLM, the parser keeps only the
    first tool call of the answer."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def has_tool_call(self) -> bool:
        return self._parser.has_tool_call

    def push(self, text: str) -> list[Json]:
        return [delta for delta in self._parser.push(text) if _has_no_later_call(delta)]

    def flush(self) -> list[Json]:
        return [delta for delta in self._parser.flush() if _has_no_later_call(delta)]

    def parse_whole(self, text: str) -> ParsedAnswer:
        answer = self._parser.parse_whole(text)
        return ParsedAnswer(answer.content, answer.calls[:1])


def _has_no_later_call(delta: Json) -> bool:
    return all(call["index"] == 0 for call in delta.get("tool_calls", ()))


class NamedToolParser:
    """Parser for requests that name a tool. The whole answer consists of the arguments of this
    tool, as JSON."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.has_tool_call = False

    def push(self, text: str) -> list[Json]:
        if not text:
            return []
        name = [] if self.has_tool_call else [_name_delta(0, self._name)]
        self.has_tool_call = True
        return [*name, _arguments_delta(0, text)]

    def flush(self) -> list[Json]:
        return []

    def parse_whole(self, text: str) -> ParsedAnswer:
        return ParsedAnswer("", [_tool_call(self._name, text)] if text.strip() else [])


class RequiredToolParser:
    """Parser for requests with `tool_choice` required. The answer is a JSON array of tool calls
    {"name": …, "parameters": …}, with the keys in this order.

    >>> parser = RequiredToolParser()
    >>> deltas = parser.push('[{"name": "add", "parameters": {"a": 1}}]')
    >>> [delta["tool_calls"][0]["function"] for delta in deltas]
    [{'name': 'add'}, {'arguments': '{"a": 1}'}]
    """

    def __init__(self) -> None:
        self._depth = 0
        """Number of open brackets and braces. 2 means that the position is inside the object of a
        tool call."""
        self._in_string = self._is_escaped = False
        self._head = ""
        """Text of the current tool call before the parameters of this call."""
        self._in_parameters = False
        self._parameters_have_begun = False
        """Whether a character of the parameters that is not white space has been read."""
        self._num_calls = 0

    @property
    def has_tool_call(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[Json]:
        deltas: list[Json] = []
        arguments = ""
        for character in text:
            was_in_parameters = self._in_parameters
            arguments += self._read(character)
            if was_in_parameters and not self._in_parameters and arguments:
                deltas.append(_arguments_delta(self._num_calls - 1, arguments))
                arguments = ""
            elif self._in_parameters and not was_in_parameters:
                deltas.append(_name_delta(self._num_calls - 1, self._name()))
        if arguments:
            deltas.append(_arguments_delta(self._num_calls - 1, arguments))
        return deltas

    def flush(self) -> list[Json]:
        return []

    def parse_whole(self, text: str) -> ParsedAnswer:
        """Return the tool calls of a whole answer. As in vLLM, an incomplete answer has no tool
        calls."""
        try:
            calls = [
                _tool_call(call["name"], json.dumps(call["parameters"], ensure_ascii=False))
                for call in json.loads(text)
            ]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ParsedAnswer("", [])
        return ParsedAnswer("", calls)

    def _read(self, character: str) -> str:
        """Read the next character of the JSON array. If the character belongs to the arguments of a
        tool call, return the character. Otherwise return ""."""
        depth_before = self._depth
        self._track_nesting(character)
        if self._in_parameters:
            is_after_value = depth_before == 2 and not self._in_string
            if is_after_value and (self._depth < 2 or character == ","):
                self._in_parameters = self._parameters_have_begun = False
                self._head = ""
                return ""
            self._parameters_have_begun = self._parameters_have_begun or not character.isspace()
            return character if self._parameters_have_begun else ""
        if depth_before >= 2 or self._depth >= 2:
            self._head += character
        if depth_before == 2 and character == ":" and not self._in_string:
            self._in_parameters = self._head[:-1].rstrip().endswith('"parameters"')
            self._num_calls += self._in_parameters
        return ""

    def _track_nesting(self, character: str) -> None:
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
        match = _NAME.search(self._head)
        return json.loads(match[1]) if match else ""


def _split_tool_calls(text: str) -> ParsedAnswer:
    """Return the content and the tool calls of a text with tool calls in Hermes format. The content
    is the text before the first tool call. If any tool call cannot be parsed, the whole text is
    content."""
    if TOOL_OPEN not in text:
        return ParsedAnswer(text, [])
    try:
        calls = [_hermes_call(orjson.loads(body)) for body in _TOOL_CALL.findall(text)]
    except (ValueError, KeyError, TypeError):
        return ParsedAnswer(text, [])
    return ParsedAnswer(text[: text.index(TOOL_OPEN)] or None, calls)


def _hermes_call(body: object) -> Json:
    """Convert the parsed JSON of one Hermes tool call to OpenAI's format. Raises ValueError if
    `body` is not an object. Raises KeyError if `body` has no name."""
    if not isinstance(body, dict):
        raise ValueError("a tool call is a JSON object")
    body = cast(Json, body)
    arguments = body.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _tool_call(str(body["name"]), text)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _name_delta(index: int, name: str, id: str | None = None) -> Json:
    call: Json = {"id": id or new_tool_call_id(), "type": "function", "index": index}
    return {"content": None, "tool_calls": [call | {"function": {"name": name}}]}


def _arguments_delta(index: int, text: str) -> Json:
    call: Json = {"index": index, "function": {"arguments": text}}
    return {"content": None, "tool_calls": [call]}


def _tool_call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": new_tool_call_id(), "type": "function", "function": function}
