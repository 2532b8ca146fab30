"""Answers that are none, and whose fault that is. Pure.

What the engine broke off is nobody's answer: no hook sees it, and nothing of it trains. What the
model broke off or garbled itself is an answer of the policy's: it keeps its place in its group, for
without the worst the others' mean would be too high. It may get a floor of its own, so that not to
answer never pays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from pydantic import Field

from fakevllm.section import Section
from fakevllm_adapters.formats.base import Answer, Json

BROKEN_OFF = frozenset({"abort", "error"})
"""Finish reasons of answers that the engine did not bring to an end."""
_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""How calls begin in the text of models that vLLM has parsers for; a parser that cannot read a call
leaves it there."""
_JSON_FORMATS = frozenset({"json_object", "json_schema"})


class RewardSection(Section):
    failure_floor: float | None = Field(default=None, allow_inf_nan=False)
    """The most that a sibling gets whose answer failed by the model's own fault, whatever the hook
    says; never more than the worst of the others. None: what the hook says."""


class Failure(StrEnum):
    """Of the model's own making, as the ledger tells it."""

    CUT_OFF = "cut_off"
    """At its `max_tokens`, or at the end of the context."""
    BROKEN_TOOL_CALL = "broken_tool_call"
    EMPTY = "empty"
    NOT_JSON = "not_json"
    """Where JSON was asked for."""


def is_broken_off(answer: Answer) -> bool:
    return answer.finish_reason in BROKEN_OFF


def failure_of(answer: Answer, body: Json) -> Failure | None:
    """`body` is the request as it went upstream.

    >>> failure_of(Answer({"content": "So then I"}, "length"), {})
    <Failure.CUT_OFF: 'cut_off'>
    >>> failure_of(Answer({"content": "7"}, "stop"), {}) is None
    True
    """
    if answer.finish_reason == "length":
        return Failure.CUT_OFF
    calls: list[Any] = answer.message.get("tool_calls") or []
    if _offers_tools(body) and (_is_left_in(answer.text) or not all(map(_is_whole, calls))):
        return Failure.BROKEN_TOOL_CALL
    if calls:
        return None
    if not answer.text.strip():
        return Failure.EMPTY
    return Failure.NOT_JSON if _wants_json(body) and _read(answer.text) is None else None


def with_floor(
    rewards: Sequence[float | None], failures: Sequence[Failure | None], floor: float | None
) -> list[float | None]:
    """
    >>> with_floor([0.5, 0.9, None], [None, Failure.EMPTY, Failure.CUT_OFF], -1.0)
    [0.5, -1.0, -1.0]
    >>> with_floor([-3.0, 0.9], [None, Failure.EMPTY], -1.0)
    [-3.0, -3.0]
    """
    if floor is None:
        return list(rewards)
    judged = list(zip(rewards, failures, strict=True))
    others = [reward for reward, failure in judged if failure is None and reward is not None]
    least = min([floor, *others])
    return [reward if failure is None else least for reward, failure in judged]


def _offers_tools(body: Json) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def _is_left_in(text: str) -> bool:
    return any(opening in text for opening in _OPENINGS)


def _is_whole(call: Any) -> bool:
    """Whether a client can read it. No arguments at all are an empty object to most."""
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    except (LookupError, TypeError, AttributeError):
        return False
    return bool(name) and isinstance(arguments, str) and isinstance(_read(arguments), dict)


def _wants_json(body: Json) -> bool:
    wanted: Any = body.get("response_format")
    return isinstance(wanted, dict) and wanted.get("type") in _JSON_FORMATS  # pyright: ignore[reportUnknownMemberType]


def _read(text: str) -> Any:
    """None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
