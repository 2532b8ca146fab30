"""Which sibling the app gets, from what the siblings and the hook said. Pure; chance is passed
in."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fakevllm_adapters.formats.base import Answer, Json


@dataclass(frozen=True, slots=True)
class Selection:
    """Sibling indices; None where no sibling answered, or none was ranked."""

    served: int | None
    best: int | None
    propensity: float | None = None
    """With which chance this one would have been served, of the same answers with the same
    rewards. What users say of answers can be weighed by its inverse."""
    is_random: bool = False
    """Drawn from all that can be shown, whatever their rewards."""


def decide(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    chance: random.Random,
    showable: Collection[int] | None = None,
    random_fraction: float = 0.0,
) -> Selection:
    """The sibling with the highest reward, ties broken at random; without rewards the lead, or who
    comes first. `showable`: who can be served, all by default; the best may be none of them.
    `random_fraction`: how often any of them is served instead.

    >>> decide([0, 1, 2], {0: 0.1, 1: 0.9, 2: None}, random.Random(0))
    Selection(served=1, best=1, propensity=1.0, is_random=False)
    >>> decide([1, 2], None, random.Random(0))
    Selection(served=1, best=None, propensity=1.0, is_random=False)
    >>> decide([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), showable=[0])
    Selection(served=0, best=1, propensity=1.0, is_random=False)
    """
    shown = [index for index in answered if showable is None or index in showable] or [*answered]
    if not shown:
        return Selection(None, None)
    scored = _scored(answered, rewards)
    tied = _top({index: scored[index] for index in shown if index in scored}) or [min(shown)]
    is_random = random_fraction > 0 and chance.random() < random_fraction
    served = chance.choice(shown if is_random else tied)
    top_share = 1 / len(tied) if served in tied else 0.0
    propensity = (1 - random_fraction) * top_share + random_fraction / len(shown)
    return Selection(served, best_of(answered, rewards, chance, served), propensity, is_random)


def best_of(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    chance: random.Random,
    served: int | None,
) -> int | None:
    """The one ranked first: of several the served one, else any.

    >>> best_of([0, 1, 2], {0: 1.0, 1: 0.0, 2: 1.0}, random.Random(0), served=2)
    2
    """
    tied = _top(_scored(answered, rewards))
    if not tied:
        return None
    return served if served in tied else chance.choice(tied)


def _scored(
    answered: Sequence[int], rewards: Mapping[int, float | None] | None
) -> dict[int, float]:
    found = rewards or {}
    return {index: reward for index in answered if (reward := found.get(index)) is not None}


def _top(scored: Mapping[int, float]) -> list[int]:
    top = max(scored.values(), default=None)
    return [index for index, reward in scored.items() if reward == top]


# Answers that are none, and whose fault that is. Pure.
#
# An answer that the engine broke off is never scored and never trained. An answer that the model
# itself broke off or garbled belongs to the policy: it keeps its place in the group, because
# without the worst answers the mean of the others would be too high. A reward floor can make sure
# that a failed answer never pays.

BROKEN_OFF = frozenset({"abort", "error"})
"""Finish reasons of answers that the engine did not bring to an end."""
_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""How calls begin in the text of models that vLLM has parsers for; a parser that cannot read a call
leaves it there."""
_JSON_FORMATS = frozenset({"json_object", "json_schema"})


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
