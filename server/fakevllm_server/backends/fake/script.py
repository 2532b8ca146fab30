"""Scripts: directives in a user message that determine the fake engine's answers.

    [[say TEXT]]              Answer TEXT.
    [[call NAME {"a": 1}]]    Call a tool.
    [[call A {…} & B {…}]]    Call two tools in one turn.
    [[slow SECONDS]]          Wait before each token.
    [[crash]]                 Exit the process.

The script of a conversation is its last user message with a directive. Several [[call …]]
directives are executed in order, one directive per assistant turn. The number of tool results after
the script determines which directive is next. After the last tool call, the answer is the TEXT of
[[say TEXT]], or "done" if this directive is missing. The script ends when the assistant has
answered without a tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_DIRECTIVE = re.compile(r"\[\[(say|slow|crash)\s*(.*?)\]\]", re.DOTALL)
_CALL = re.compile(r"\[\[call\s+")
_NAME = re.compile(r"\s*([^\s{&\]]+)\s*")


class Turn(NamedTuple):
    """One message of the prompt. It has the role and the text of the message, and says if the
    message contains a tool call."""

    role: str
    text: str
    has_tool_call: bool


class ToolCall(NamedTuple):
    """A tool call in a scripted answer."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Script:
    """The scripted answer for the current turn of a conversation."""

    answer: str | None = None
    """Text to answer if no tool is called. None means that the engine's policy samples the answer.
    """
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    """Tools to call in this turn."""
    delay_s: float = 0.0
    """Seconds to wait before each token."""
    crashes: bool = False
    """Whether the process exits instead of answering."""

    @property
    def text(self) -> str | None:
        """Text of the scripted answer. Tool calls in the text are in Hermes format. None if no
        answer is scripted: the fake engine then samples an answer."""
        if not self.calls:
            return self.answer
        bodies = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
        return "\n".join(
            f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>" for body in bodies
        )


def read_script(turns: Sequence[Turn]) -> Script:
    """Return the scripted answer to a conversation. `turns` are the messages before the answer.

    >>> read_script([Turn("user", "[[say hi]]", False)]).text
    'hi'
    """
    scripted = [
        at for at, turn in enumerate(turns) if turn.role == "user" and _has_directive(turn.text)
    ]
    if not scripted:
        return Script()
    since = turns[scripted[-1] + 1 :]
    if any(turn.role == "assistant" and not turn.has_tool_call for turn in since):
        return Script()
    groups, rest = _call_groups(turns[scripted[-1]].text)
    directives: dict[str, str] = dict(_DIRECTIVE.findall(rest))
    answer = directives.get("say", "done" if groups else None)
    num_results = sum(turn.role == "tool" for turn in since)
    pending: list[ToolCall] = []
    for group in groups:
        if num_results <= 0:
            pending = group
            break
        num_results -= len(group)
    delay_s = float(directives.get("slow", 0))
    return Script(answer, pending, delay_s, "crash" in directives)


def _has_directive(text: str) -> bool:
    return bool(_DIRECTIVE.search(text) or _call_groups(text)[0])


def _call_groups(text: str) -> tuple[list[list[ToolCall]], str]:
    """Parse the [[call …]] directives of a message, and return (groups, rest). `groups` has the
    list of tool calls of each directive. `rest` is the text of the message without these
    directives. A directive that cannot be parsed stays in `rest`."""
    groups: list[list[ToolCall]] = []
    rest = ""
    at = 0
    for match in _CALL.finditer(text):
        if match.start() < at:
            continue
        group, end = _parse_group(text, match.end())
        if group:
            groups.append(group)
            rest += text[at : match.start()]
            at = end
    return groups, rest + text[at:]


def _parse_group(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Parse the tool calls of one [[call …]] directive, starting at position `at` of the text.
    Return the tool calls, and the position after the directive. If the directive cannot be parsed,
    the list of tool calls is empty."""
    calls: list[ToolCall] = []
    while name := _NAME.match(text, at):
        at = name.end()
        arguments: Any = {}
        if text[at : at + 1] == "{":
            try:
                arguments, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                return [], at
        calls.append(ToolCall(name[1], arguments))
        end = re.compile(r"\s*(&|\]\])").match(text, at)
        if end is None:
            return [], at
        at = end.end()
        if end[1] == "]]":
            return calls, at
    return [], at
