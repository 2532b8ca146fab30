"""Selection of the sibling (sampled answer) to serve, and detection of unusable answers. This
module does no I/O, and the caller passes the random number generator.

Unusable answers are treated in two ways:

* An answer that the engine did not complete is never scored and never trained. An example is an
  answer that ended with an error.
* An answer that the model itself made unusable is scored and trained. An example is an answer that
  reached `max_tokens`. If such answers were left out, the mean reward of the group would be too
  high. The setting `reward.failure_floor` gives these answers a low reward.
"""

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
    """The indices of the served sibling and of the best sibling among the answers that were sampled
    for one request."""

    served: int | None
    """The sibling that the app gets; None if no sibling answered."""
    best: int | None
    """The sibling with the highest reward; None if no sibling has a reward."""
    propensity: float | None = None
    """Probability with which the served sibling is chosen, given the answers and rewards. The
    inverse of this probability can be used as an importance weight for users' feedback on served
    answers."""
    is_random: bool = False
    """Whether the served sibling was chosen at random, regardless of the rewards."""


def seeded_random(seed: int, question: str) -> random.Random:
    """Return the random number generator for a request that has a seed.

    The generator depends on the seed and on the question (the text of the last user message). If a
    request is repeated with the same seed, ties between rewards are broken in the same way. If an
    app sends the same seed with all requests, different questions still get different random
    numbers.

    >>> seeded_random(42, "hi").random() == seeded_random(42, "hi").random()
    True
    """
    return random.Random(f"{seed} {question}".encode(errors="replace"))


def select(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    rng: random.Random,
    servable: Collection[int] | None = None,
    random_fraction: float = 0.0,
) -> Selection:
    """Return the sibling to serve and the best sibling.

    `answered` has the indices of the siblings (sampled answers) to choose from. A sibling is
    servable if its answer can be translated into the app's API format. `servable` has the indices
    of the servable siblings. If `servable` is None, or if no sibling in `answered` is servable, all
    siblings in `answered` are treated as servable.

    * The served sibling is the servable sibling with the highest reward. Ties are broken at random.
      If no servable sibling has a reward, the servable sibling with the lowest index is served.
    * With the probability `random_fraction`, a random servable sibling is served instead.
    * The best sibling is the answered sibling with the highest reward. It may be a sibling that is
      not servable.

    >>> select([0, 1, 2], {0: 0.1, 1: 0.9, 2: None}, random.Random(0))
    Selection(served=1, best=1, propensity=1.0, is_random=False)
    >>> select([1, 2], None, random.Random(0))
    Selection(served=1, best=None, propensity=1.0, is_random=False)
    >>> select([0, 1], {0: 0.1, 1: 0.9}, random.Random(0), servable=[0])
    Selection(served=0, best=1, propensity=1.0, is_random=False)
    """
    candidates = [i for i in answered if servable is None or i in servable] or [*answered]
    if not candidates:
        return Selection(None, None)
    scored = _scored(answered, rewards)
    top = _top({i: scored[i] for i in candidates if i in scored}) or [min(candidates)]
    is_random = random_fraction > 0 and rng.random() < random_fraction
    served = rng.choice(candidates if is_random else top)
    top_share = 1 / len(top) if served in top else 0.0
    propensity = (1 - random_fraction) * top_share + random_fraction / len(candidates)
    return Selection(served, best_sibling(answered, rewards, rng, served), propensity, is_random)


def best_sibling(
    answered: Sequence[int],
    rewards: Mapping[int, float | None] | None,
    rng: random.Random,
    served: int | None,
) -> int | None:
    """Return the index of the sibling (sampled answer) with the highest reward, or None if there
    are no rewards.

    If several siblings have the highest reward, return `served` if it is one of them. Otherwise,
    return one of them at random.

    >>> best_sibling([0, 1, 2], {0: 1.0, 1: 0.0, 2: 1.0}, random.Random(0), served=2)
    2
    """
    top = _top(_scored(answered, rewards))
    if not top:
        return None
    return served if served in top else rng.choice(top)


def _scored(
    answered: Sequence[int], rewards: Mapping[int, float | None] | None
) -> dict[int, float]:
    by_index = rewards or {}
    return {index: reward for index in answered if (reward := by_index.get(index)) is not None}


def _top(scored: Mapping[int, float]) -> list[int]:
    top = max(scored.values(), default=None)
    return [index for index, reward in scored.items() if reward == top]


BROKEN_OFF = frozenset({"abort", "error"})
"""Values of `finish_reason` with which the engine marks answers that it did not complete."""
_CALL_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""Texts with which tool calls begin in the raw output of models for which vLLM has a tool parser.
If the parser cannot read a tool call, vLLM leaves the raw text in the answer."""
_JSON_FORMATS = frozenset({"json_object", "json_schema"})


class Failure(StrEnum):
    """A way in which the model itself made an answer unusable. The ledger stores these values."""

    CUT_OFF = "cut_off"
    """The answer ended at `max_tokens` or at the end of the context."""
    BROKEN_TOOL_CALL = "broken_tool_call"
    """The request offered tools, and a tool call of the answer cannot be parsed."""
    EMPTY = "empty"
    """The answer has no text and no tool call."""
    NOT_JSON = "not_json"
    """The request asked for JSON, and the answer is not JSON."""


def is_broken_off(answer: Answer) -> bool:
    """Return True if the engine did not complete the answer."""
    return answer.finish_reason in BROKEN_OFF


def failure_of(answer: Answer, body: Json) -> Failure | None:
    """Return the way in which the model itself made an answer unusable, or None for a usable
    answer. `body` is the body of the request to which the answer belongs.

    >>> failure_of(Answer({"content": "So then I"}, "length"), {})
    <Failure.CUT_OFF: 'cut_off'>
    >>> failure_of(Answer({"content": "7"}, "stop"), {}) is None
    True
    """
    if answer.finish_reason == "length":
        return Failure.CUT_OFF
    calls: list[Any] = answer.message.get("tool_calls") or []
    if _offers_tools(body) and (
        _has_call_opening(answer.text) or not all(map(_is_readable_call, calls))
    ):
        return Failure.BROKEN_TOOL_CALL
    if calls:
        return None
    if not answer.text.strip():
        return Failure.EMPTY
    return Failure.NOT_JSON if _wants_json(body) and _parse(answer.text) is None else None


def with_floor(
    rewards: Sequence[float | None], failures: Sequence[str | None], floor: float | None
) -> list[float | None]:
    """Return a copy of the rewards in which each failed answer has the same low reward.

    An answer has failed if its entry in `failures` is not None. The low reward is the lower of two
    numbers: `floor`, and the lowest reward of the answers that did not fail. If `floor` is None,
    all rewards stay unchanged.

    >>> with_floor([0.5, 0.9, None], [None, Failure.EMPTY, Failure.CUT_OFF], -1.0)
    [0.5, -1.0, -1.0]
    >>> with_floor([-3.0, 0.9], [None, Failure.EMPTY], -1.0)
    [-3.0, -3.0]
    """
    if floor is None:
        return list(rewards)
    pairs = list(zip(rewards, failures, strict=True))
    others = [reward for reward, failure in pairs if failure is None and reward is not None]
    lowest = min([floor, *others])
    return [reward if failure is None else lowest for reward, failure in pairs]


def _offers_tools(body: Json) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def _has_call_opening(text: str) -> bool:
    return any(opening in text for opening in _CALL_OPENINGS)


def _is_readable_call(call: Any) -> bool:
    """Return True if clients can parse this tool call. A tool call without arguments counts as
    readable, because most clients treat missing arguments as an empty object."""
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    except (LookupError, TypeError, AttributeError):
        return False
    return bool(name) and isinstance(arguments, str) and isinstance(_parse(arguments), dict)


def _wants_json(body: Json) -> bool:
    response_format: Any = body.get("response_format")
    return isinstance(response_format, dict) and response_format.get("type") in _JSON_FORMATS  # pyright: ignore[reportUnknownMemberType]


def _parse(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
