"""Three made-up tasks: sums, countdown and tool calls. This module does no I/O.

A question is held out if its checksum says so. Therefore neither the training from nothing nor the
reinforcement learning ever sees a held-out question, whatever their seeds are.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.gpu_learn_parts.hook import value_of

Json = dict[str, Any]

HELD_OUT_SHARE = 6
"""One in this number of questions is held out."""
ATTEMPTS_PER_ROW = 200
"""Number of random questions that are drawn at most for each row of a dataset."""
MAX_OFFSET = 3
"""Largest difference between a wrong sum and the right one."""
OPERATORS = "+-*"


@dataclass(frozen=True, slots=True)
class Question:
    """A question with a right and a wrong reply."""

    text: str
    fields: Json
    """Fields of the dataset row with which the reward hook compares a reply."""
    right: str
    wrong: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % HELD_OUT_SHARE == 0


class TaskKind(Protocol):
    """A source of random questions of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def tools(self) -> Sequence[Json]:
        """Tools of each request. Empty if the requests have no tools."""
        ...

    def random_question(self, rng: random.Random) -> Question: ...


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of two numbers.

    >>> Sums(8).random_question(random.Random(0))
    Question(text='What is 6 plus 6?', fields={'answer': 12}, right='It is 12.', wrong='It is 9.')
    """

    below: int
    """Both numbers are smaller than this number."""
    name = "sums"
    tools = ()

    def random_question(self, rng: random.Random) -> Question:
        left, right = rng.randrange(self.below), rng.randrange(self.below)
        answer = left + right
        offsets = [offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset]
        wrong = abs(answer + rng.choice(offsets))
        if wrong == answer:  # for example 1 instead of -1
            wrong += 1
        return Question(
            f"What is {left} plus {right}?",
            {"answer": answer},
            f"It is {answer}.",
            f"It is {wrong}.",
        )


@dataclass(frozen=True, slots=True)
class Countdown:
    """Countdown: an expression that has a certain value, and in which each given number occurs
    once.

    >>> question = Countdown(3, 12).random_question(random.Random(0))
    >>> question.text, question.right
    ('Make 20 from 4, 6 and 10.', '4 + 6 + 10')
    """

    num_numbers: int
    largest: int
    """Largest given number."""
    name = "countdown"
    tools = ()

    def random_question(self, rng: random.Random) -> Question:
        numbers = [rng.randint(1, self.largest) for _ in range(self.num_numbers)]
        right = wrong = _random_expression(numbers, rng)
        target = value_of(right)
        if target < 0:
            return self.random_question(rng)
        while value_of(wrong) == target:
            wrong = _random_expression(numbers, rng)
        *first, last = map(str, sorted(numbers))
        return Question(
            f"Make {target} from {', '.join(first)} and {last}.",
            {"numbers": sorted(numbers), "target": target},
            right,
            wrong,
        )


def _random_expression(numbers: Sequence[int], rng: random.Random) -> str:
    first, *others = rng.sample(numbers, len(numbers))
    return " ".join([str(first), *(f"{rng.choice(OPERATORS)} {number}" for number in others)])


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Instructions that one of two tools can follow.

    >>> question = ToolCalls(4).random_question(random.Random(1))
    >>> question.text, question.fields["name"], question.fields["arguments"]
    ('Wake me at 0:10.', 'alarm', {'hour': 0, 'minute': 10})
    """

    num_values: int
    """Number of different hours, minutes, goods and numbers of goods."""
    name = "tools"

    @property
    def tools(self) -> Sequence[Json]:
        return TOOLS

    def random_question(self, rng: random.Random) -> Question:
        text, call = self._random_instruction(rng)
        wrong = call
        while wrong == call:
            wrong = self._random_instruction(rng)[1]
            if rng.random() < 0.5:  # the right tool, with one wrong argument
                wrong = self._with_wrong_argument(call, rng)
        messages = [{"role": "user", "content": text}]
        fields = {**call, "messages": messages, "tools": list(TOOLS)}
        return Question(text, fields, call_text(call), call_text(wrong))

    def _random_instruction(self, rng: random.Random) -> tuple[str, Json]:
        if rng.random() < 0.5:
            hour, minute = (
                rng.randrange(self.num_values),
                5 * rng.randrange(min(12, self.num_values)),
            )
            text = rng.choice(["Wake me at {}.", "Set an alarm for {}."])
            call = {"name": "alarm", "arguments": {"hour": hour, "minute": minute}}
            return text.format(f"{hour}:{minute:02}"), call
        item, count = rng.choice(GOODS[: self.num_values]), rng.randrange(2, 2 + self.num_values)
        text = rng.choice(["Buy {}.", "We need {}."])
        call = {"name": "add_item", "arguments": {"item": item, "count": count}}
        return text.format(f"{count} {item}"), call

    def _with_wrong_argument(self, call: Json, rng: random.Random) -> Json:
        other: Json = {"name": ""}
        while other["name"] != call["name"]:
            other = self._random_instruction(rng)[1]
        changed = rng.choice(list(call["arguments"]))
        arguments = {**call["arguments"], changed: other["arguments"][changed]}
        return {"name": call["name"], "arguments": arguments}


GOODS = (
    *("apples", "eggs", "lemons", "plums", "pears", "beans", "cups", "pens"),
    *("nails", "books", "lamps", "forks", "spoons", "plates", "stamps", "bulbs"),
    *("carrots", "onions", "bananas", "rolls", "cakes", "brushes", "bags", "boxes"),
)


def _tool(name: str, **properties: str) -> Json:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (
    _tool("alarm", hour="integer", minute="integer"),
    _tool("add_item", item="string", count="integer"),
)


def call_text(call: Json) -> str:
    """Return the text of a tool call in the format of the model's chat template."""
    arguments = json.dumps(call["arguments"])
    return f'\n<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>'


def random_questions(
    kind: TaskKind, rng: random.Random, *, held_out: bool = False
) -> Iterator[Question]:
    """Yield random questions forever: held-out ones, or the others."""
    while True:
        question = kind.random_question(rng)
        if question.is_held_out == held_out:
            yield question


def dataset(
    kinds: Sequence[TaskKind], num_per_kind: int, seed: int, *, held_out: bool
) -> list[Json]:
    """Return dataset rows with different questions, at most `num_per_kind` of each kind. If a kind
    has fewer questions, all or nearly all of them are returned."""
    rows: dict[str, Json] = {}
    for kind in kinds:
        source = random_questions(kind, random.Random(f"{seed} {kind.name}"), held_out=held_out)
        found: dict[str, Json] = {}
        for _ in range(ATTEMPTS_PER_ROW * num_per_kind):
            if len(found) == num_per_kind:
                break
            question = next(source)
            found[question.text] = {
                "question": question.text,
                "kind": kind.name,
                **question.fields,
            }
        rows |= found
    return list(rows.values())
