"""What a user message tells the fake engine to answer. Pure.

    [[say TEXT]]                  answers TEXT
    [[call NAME {"a": 1}]]        calls the tool; several are called one per turn, in this order,
    [[call A {…} & B {…}]]        and these two in one turn; then follows [[say TEXT]], or "done"
    [[slow SECONDS]]              waits before each token
    [[crash]]                     ends the process

The last user message with any of them counts, until the assistant has answered it without calling
a tool; which call is next, the tool results since then tell.
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
    """One message of the prompt."""

    role: str
    text: str
    called: bool
    """A tool, or several."""


class ToolCall(NamedTuple):
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Script:
    said: str | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    """To be made now, together."""
    delay_s: float = 0.0
    crashes: bool = False

    @property
    def text(self) -> str | None:
        """The answer, calls in Hermes' form; None: the policy's own."""
        if not self.calls:
            return self.said
        bodies = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
        return "\n".join(
            f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>" for body in bodies
        )


def script_of(turns: Sequence[Turn]) -> Script:
    """`turns` up to the one to be answered.

    >>> script_of([Turn("user", "[[say hi]]", False)]).text
    'hi'
    """
    told = [at for at, turn in enumerate(turns) if turn.role == "user" and _tells(turn.text)]
    if not told:
        return Script()
    since = turns[told[-1] + 1 :]
    if any(turn.role == "assistant" and not turn.called for turn in since):
        return Script()
    text = turns[told[-1]].text
    groups, rest = _calls(text)
    directives: dict[str, str] = dict(_DIRECTIVE.findall(rest))
    said = directives.get("say", "done" if groups else None)
    num_results = sum(turn.role == "tool" for turn in since)
    pending: list[ToolCall] = []
    for group in groups:
        if num_results <= 0:
            pending = group
            break
        num_results -= len(group)
    delay_s = float(directives.get("slow", 0))
    return Script(said, pending, delay_s, "crash" in directives)


def _tells(text: str) -> bool:
    return bool(_DIRECTIVE.search(text) or _calls(text)[0])


def _calls(text: str) -> tuple[list[list[ToolCall]], str]:
    """Groups of calls, and the text without them. What does not parse is text."""
    groups: list[list[ToolCall]] = []
    rest = ""
    at = 0
    for found in _CALL.finditer(text):
        if found.start() < at:
            continue
        group, end = _group(text, found.end())
        if group:
            groups.append(group)
            rest += text[at : found.start()]
            at = end
    return groups, rest + text[at:]


def _group(text: str, at: int) -> tuple[list[ToolCall], int]:
    calls: list[ToolCall] = []
    while named := _NAME.match(text, at):
        at = named.end()
        arguments: Any = {}
        if text[at : at + 1] == "{":
            try:
                arguments, at = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                return [], at
        calls.append(ToolCall(named[1], arguments))
        end = re.compile(r"\s*(&|\]\])").match(text, at)
        if end is None:
            return [], at
        at = end.end()
        if end[1] == "]]":
            return calls, at
    return [], at
