"""Calls to train on: synthetic sessions of given shapes, with random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.forest import CallTokens, build_forest

BUDGET = TrainJob().micro_batch_tokens
"""Largest size of one piece: the number of tokens of its rows, including padding, or the number of
its forest nodes."""
VOCAB = 512
"""Size of the vocabulary of the demo's tokenizer."""


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of one session, to be trained together."""

    name: str
    calls: Sequence[CallTokens]
    """Calls in the order of the session, siblings next to each other."""
    budget: int = BUDGET
    """Largest number of tokens in one piece."""
    num_siblings: int = 1

    @property
    def rho(self) -> float:
        """Sharing factor: the number of tokens of all calls, divided by the number of nodes of
        their forest."""
        return build_forest(self.calls).rho

    @property
    def num_trained(self) -> int:
        """Number of trained tokens, which are those of the responses."""
        return sum(end - start for call in self.calls for start, end in call.trained)

    def first_siblings(self) -> Case:
        """Return a case with only the first sibling of each group."""
        return replace(self, calls=self.calls[:: self.num_siblings], num_siblings=1)


class Shape(NamedTuple):
    """Shape of an app's session. Each turn has N siblings. The next turn continues the answer of
    the first sibling."""

    prompt: int
    """Number of tokens of the first prompt."""
    response: int
    """Number of tokens of each answer."""
    siblings: int
    turns: int = 1
    observed: int = 0
    """Number of tokens between an answer and the next answer, such as those of tool results."""

    @property
    def name(self) -> str:
        turns = f" T{self.turns} O{self.observed}" if self.turns > 1 else ""
        return f"P{self.prompt} R{self.response} N{self.siblings}{turns}"

    def create_case(self) -> Case:
        """Return a case of this shape with random tokens. Each call returns the same tokens."""
        chance = random.Random(0)
        calls: list[CallTokens] = []
        prompt = random_ids(chance, self.prompt)
        for _ in range(self.turns):
            answers = [random_ids(chance, self.response) for _ in range(self.siblings)]
            calls += [CallTokens.of(prompt, answer) for answer in answers]
            prompt = [*prompt, *answers[0], *random_ids(chance, self.observed)]
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


def random_ids(chance: random.Random, number: int) -> list[int]:
    """Return random token ids."""
    return [chance.randrange(VOCAB) for _ in range(number)]


def merge_extending_calls(calls: Sequence[CallTokens]) -> list[CallTokens]:
    """Merge each call that begins with all tokens of an earlier call into this earlier call.

    The merged call is one row, in which the trained tokens of both calls are marked. Siblings are
    not merged.
    """
    merged: list[CallTokens] = []
    for call in calls:
        ids = list(call.ids)
        earlier = next((row for row in merged if _extends(ids, list(row.ids))), None)
        if earlier is None:
            merged.append(call)
        else:
            spans = [*earlier.trained, *call.trained]
            merged[merged.index(earlier)] = CallTokens(ids, spans)
    return merged


def _extends(ids: list[int], earlier: list[int]) -> bool:
    # An equal call is a sibling with the same answer. It is not merged, so its tokens are trained
    # again.
    return len(ids) > len(earlier) and ids[: len(earlier)] == earlier
