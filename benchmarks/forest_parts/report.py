"""What benchmarks.forest found, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.forest_parts.cases import BUDGET, Case, Shape
from benchmarks.forest_parts.measurement import Measured, Sample
from benchmarks.forest_parts.recorded_sessions import BUDGET as SESSION_BUDGET
from benchmarks.forest_parts.variants import OURS

GOALS = {
    Shape(1024, 32, 8).name: 3.0,
    Shape(256, 32, 8, 6, 32).name: 5.0,
    Shape(64, 512, 8).name: 0.95,
}
"""Times as fast as naive rows, at least."""
OVER_TRL = 2.0
"""Times TRL's training tokens per second."""
TRAINERS = ("TRL", "ours, rows", "ours")


class Peer(Protocol):
    """One case, trained by TRL and by us."""

    @property
    def case(self) -> Case: ...
    @property
    def samples(self) -> dict[str, Sample]: ...
    @property
    def gradient_off(self) -> float: ...
    def speed(self, name: str) -> float: ...
    def trained_per_s(self, name: str) -> float: ...


class Section(NamedTuple):
    told: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Found:
    shapes: list[Measured] = field(default_factory=list[Measured])
    sessions: list[Measured] = field(default_factory=list[Measured])
    reckoned: list[Measured] = field(default_factory=list[Measured])
    peers: list[Peer] = field(default_factory=list[Peer])
    trl: str = ""
    """Its version."""
    notes: list[str] = field(default_factory=list[str])
    """What was skipped, and why, among them."""

    def sections(self) -> list[Section]:
        found: list[Section] = []
        if self.shapes:
            found.append(Section(_ABOUT_SHAPES, *ways_table(self.shapes)))
        if self.sessions:
            found.append(Section(_ABOUT_SESSIONS, *ways_table(self.sessions)))
        if self.reckoned:
            found.append(Section(_ABOUT_RECKONED, *ways_table(self.reckoned)))
        if self.peers:
            found.append(Section(_ABOUT_TRL.format(version=self.trl), *peers_table(self.peers)))
        return found

    def goals(self) -> list[tuple[str, bool]]:
        """A sentence for each, and whether it is reached."""
        return [
            (f"{what}: {found:.2f}, asked for at least {least}", found >= least)
            for what, found, least in self._asked()
        ]

    def _asked(self) -> Iterator[tuple[str, float, float]]:
        for one in self.shapes:
            if OURS in one.samples and one.case.name in GOALS:
                what = f"{one.case.name}, times as fast as {next(iter(one.samples))}"
                yield what, one.speed(OURS), GOALS[one.case.name]
        for peer in self.peers:
            yield f"{peer.case.name}, times TRL's tokens per second", peer.speed("ours"), OVER_TRL


def ways_table(measured: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    header = ["calls", "rho", *measured[0].samples]
    rows = [
        [one.case.name, f"{one.case.rho:.2f}", *(_cell(one, way) for way in one.samples)]
        for one in measured
    ]
    return header, rows


def _cell(one: Measured, way: str) -> str:
    sample = one.samples[way]
    tokens = f"{sample.tokens / 1000:.1f}k"
    return f"{one.speed(way):.2f}x, {sample.median_s:.2f} s, {sample.peak_mb:.0f} MB, {tokens}"


def peers_table(peers: Sequence[Peer]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [one.case.name, *(_peer_cell(one, name) for name in TRAINERS), f"{one.gradient_off:.0e}"]
        for one in peers
    ]
    return ["calls", *TRAINERS, "gradients differ by"], rows


def _peer_cell(one: Peer, name: str) -> str:
    sample = one.samples[name]
    speed = f"{one.speed(name):.2f}x, {one.trained_per_s(name):.0f} tokens/s"
    return f"{speed}, {sample.peak_mb:.0f} MB, {sample.tokens / 1000:.1f}k"


_ABOUT_SHAPES = (
    "Forward and backward: times as fast as the first way (median over rounds of what ran next to "
    "each other; the machine is shared, so seconds are worth little), CPU time, peak memory, "
    "tokens through the model with their padding. P prompt, R response, O observed tokens, N "
    f"siblings, T turns. Pieces of at most {BUDGET} tokens. `naive` lays calls out one by one, "
    "`flat merge` makes one row of a call and those it extends (AgentJet's way, where token ids "
    "agree), the others merge all and differ in how attention runs; `quickest` is what the trainer "
    "takes: chains, or rows where next to nothing is shared."
)
_ABOUT_SESSIONS = (
    "Recorded opencode sessions through the demo's tokenizer and chat template, those in which "
    "later requests tell what was answered. Answers are the recorded ones; the other 7 siblings of "
    "each call are made up, as long, of random ids, and so is an answer no later request tells. Of "
    "each system message with its tools as much is left out at its end as the bound on prompts "
    f"asks for. Pieces of at most {SESSION_BUDGET} tokens."
)
_ABOUT_RECKONED = (
    "The same sessions with nothing left out, in one round. Naive rows are reckoned: one sibling "
    "of each call was measured, and its time counted 8 times, for siblings are as long as each "
    "other; ours is measured over all siblings. Pieces of at most twice the longest prompt."
)
_ABOUT_TRL = (
    "A whole step of TRL {version}'s GRPOTrainer beside ours, in turns, on the same model, samples "
    "and advantages, float32: loss, backward, clipping, optimiser, without sampling. Times TRL's "
    "training tokens (of responses) per CPU second, these, peak memory, tokens through the model. "
    "TRL with its defaults: 8 rows a pass, prompts padded on the left and answers on the right to "
    "the longest of the step, logits of answers only, one iteration, no old log-probabilities; "
    "checkpointing and bf16 are off. `ours, rows` shares nothing."
)
