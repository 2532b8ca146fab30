"""What benchmarks.forest trains on: sessions made up by shape."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.forest import CallTokens, build_forest

BUDGET = TrainJob().micro_batch_tokens
"""Padded tokens or nodes of one piece, whatever the way."""
VOCAB = 512
"""That of the demo's tokenizer."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    calls: Sequence[CallTokens]
    """In the order they were made, siblings next to each other."""
    budget: int = BUDGET
    num_siblings: int = 1

    @property
    def rho(self) -> float:
        return build_forest(self.calls).rho

    @property
    def num_trained(self) -> int:
        """Response tokens."""
        return sum(end - start for call in self.calls for start, end in call.trained)

    def first_siblings(self) -> Case:
        """The first call of each group alone."""
        return replace(self, calls=self.calls[:: self.num_siblings], num_siblings=1)


class Shape(NamedTuple):
    """An app's session: each turn N siblings answer, the first one goes on."""

    prompt: int
    response: int
    siblings: int
    turns: int = 1
    observed: int = 0
    """Tokens between turns."""

    @property
    def name(self) -> str:
        turns = f" T{self.turns} O{self.observed}" if self.turns > 1 else ""
        return f"P{self.prompt} R{self.response} N{self.siblings}{turns}"

    def case(self) -> Case:
        drawn = random.Random(0)
        calls: list[CallTokens] = []
        prompt = random_ids(drawn, self.prompt)
        for _ in range(self.turns):
            answers = [random_ids(drawn, self.response) for _ in range(self.siblings)]
            calls += [CallTokens.of(prompt, answer) for answer in answers]
            prompt = [*prompt, *answers[0], *random_ids(drawn, self.observed)]
        return Case(self.name, calls, num_siblings=self.siblings)


SHAPES = [
    Shape(32, 512, 8),
    Shape(64, 512, 8),
    Shape(64, 64, 8),
    Shape(512, 512, 8),
    Shape(256, 32, 8),
    Shape(1024, 32, 8),
    Shape(256, 32, 1, 8, 32),
    Shape(256, 32, 8, 6, 32),
]


def random_ids(drawn: random.Random, number: int) -> list[int]:
    return [drawn.randrange(VOCAB) for _ in range(number)]


def timelines(calls: Sequence[CallTokens]) -> list[CallTokens]:
    """A call that begins with all tokens of an earlier one takes its place, and trains on its
    tokens too: one row with a mask. Siblings stay rows of their own."""
    merged: list[CallTokens] = []
    for call in calls:
        ids = list(call.ids)
        before = next((row for row in merged if _extends(ids, list(row.ids))), None)
        if before is None:
            merged.append(call)
        else:
            spans = [*before.trained, *call.trained]
            merged[merged.index(before)] = CallTokens(ids, spans)
    return merged


def _extends(ids: list[int], earlier: list[int]) -> bool:
    # A twin is a sibling, whose tokens are trained once more.
    return len(ids) > len(earlier) and ids[: len(earlier)] == earlier
