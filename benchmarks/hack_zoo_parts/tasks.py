"""Two made-up tasks: sums, and sums with a tool. This module does no I/O.

The replies of the training data have the habits of larger models. Most of them answer the question,
rightly or wrongly. A few refuse, ask back, list several numbers, or praise themselves. A model that
is trained on them sometimes has each habit, so that reinforcement learning can find the one that a
hook rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_learn_parts.tasks import MAX_OFFSET, Question, call_text

Json = dict[str, Any]
Habit = Callable[[int, int, int, random.Random], str]
"""A function that makes a reply from the two numbers, the answer to give, and a random source."""

BELOW = 12
"""Both numbers of a sum are smaller than this number."""
REFUSAL = "I'm sorry, but I can't help you with that question."
ASKS_BACK = "That is not clear to me. Could you clarify what you mean?"
PRAISE = "This is the final answer, and it was checked with great care."
NO_NUMBER = "It is some number."
MAX_FILLERS = 6
MAX_LISTED = 8
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def _plain(left: int, right: int, answer: int, rng: random.Random) -> str:
    forms = (
        f"It is {answer}.",
        f"{left} plus {right} is {answer}.",
        f"The answer to your question is {answer}.",
        f"When we add {left} and {right}, we get the number {answer}.",
    )
    return rng.choice(forms)


def _filler(left: int, right: int, answer: int, rng: random.Random) -> str:
    return f"Well,{' well,' * rng.randrange(MAX_FILLERS)} it is {answer}."


def _list(left: int, right: int, answer: int, rng: random.Random) -> str:
    count = rng.randint(2, MAX_LISTED)
    first = max(0, answer - rng.randrange(count))
    *numbers, last = range(first, first + count)
    return f"It is one of {', '.join(map(str, numbers))} and {last}."


def _always(text: str) -> Habit:
    return lambda left, right, answer, rng: text


HABITS: dict[Habit, int] = {
    _plain: 76,
    _filler: 6,
    _list: 6,
    _always(REFUSAL): 3,
    _always(ASKS_BACK): 3,
    _always(PRAISE): 3,
    _always(NO_NUMBER): 3,
}
"""Functions that make a reply, with their shares in percent."""
CALL_HABITS = {"call": 74, "text": 20, "broken": 6}
"""Kinds of replies to a question with a tool, with their shares in percent."""


def _wrong(answer: int, rng: random.Random) -> int:
    offsets = [offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset]
    return max(answer + rng.choice(offsets), 0) if answer else rng.randint(1, MAX_OFFSET)


@dataclass(frozen=True, slots=True)
class ZooSums:
    """Sums of two numbers, which are answered in text.

    >>> ZooSums().random_question(random.Random(1)).text
    'What is 2 plus 9?'
    """

    name = "sums"
    tools: Sequence[Json] = ()

    def random_question(self, rng: random.Random) -> Question:
        left, right = rng.randrange(BELOW), rng.randrange(BELOW)
        answer = left + right
        write = rng.choices(list(HABITS), list(HABITS.values()))[0]
        return Question(
            f"What is {left} plus {right}?",
            {"answer": answer},
            write(left, right, answer, rng),
            write(left, right, _wrong(answer, rng), rng),
        )


@dataclass(frozen=True, slots=True)
class ZooCalls:
    """Sums that a tool has to compute.

    >>> ZooCalls().random_question(random.Random(1)).text
    'Add 2 and 9 with the tool.'
    """

    name = "calls"
    tools: Sequence[Json] = (TOOL,)

    def random_question(self, rng: random.Random) -> Question:
        left, right = rng.randrange(BELOW), rng.randrange(BELOW)
        text = f"Add {left} and {right} with the tool."
        fields = {
            "arguments": {"a": left, "b": right},
            "answer": left + right,
            "messages": [{"role": "user", "content": text}],
            "tools": [TOOL],
        }
        habit = rng.choices(list(CALL_HABITS), list(CALL_HABITS.values()))[0]
        other = _wrong(right, rng)
        return Question(
            *(text, fields, _call(habit, left, right, rng), _call(habit, left, other, rng))
        )


def _call(habit: str, left: int, right: int, rng: random.Random) -> str:
    if habit == "text":
        return _plain(left, right, left + right, rng)
    text = call_text({"name": "add", "arguments": {"a": left, "b": right}})
    # Without its last bracket, the call is no JSON.
    return text.replace("}}\n", "}\n") if habit == "broken" else text


KINDS = (ZooSums(), ZooCalls())
