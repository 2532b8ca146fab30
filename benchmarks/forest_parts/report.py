"""Results of benchmarks.forest as tables, explanations and goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.forest_parts.cases import BUDGET, Case, Shape
from benchmarks.forest_parts.measurement import Measurement, Sample
from benchmarks.forest_parts.recorded_sessions import BUDGET as SESSION_BUDGET
from benchmarks.forest_parts.variants import OURS

GOALS = {
    Shape(1024, 32, 8).name: 3.0,
    Shape(256, 32, 8, 6, 32).name: 5.0,
    Shape(64, 512, 8).name: 0.95,
}
"""Required speed of our variant as a multiple of naive rows, by case."""
TRL_GOAL = 2.0
"""Required training tokens per second as a multiple of TRL's."""
TRAINERS = ("TRL", "ours, rows", "ours")


class TrlComparison(Protocol):
    """One case, trained by TRL and by our trainer.

    The class `trl_comparison.Comparison` has this interface. It is not imported here, because it
    needs TRL.
    """

    @property
    def case(self) -> Case: ...
    @property
    def samples(self) -> dict[str, Sample]: ...
    @property
    def gradient_difference(self) -> float: ...
    def speed(self, name: str) -> float: ...
    def trained_per_s(self, name: str) -> float: ...


class Section(NamedTuple):
    """A table with its explanation."""

    explanation: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Report:
    """All measurements of one run."""

    shapes: list[Measurement] = field(default_factory=list[Measurement])
    """Measurements of synthetic sessions."""
    sessions: list[Measurement] = field(default_factory=list[Measurement])
    """Measurements of recorded sessions with shortened prompts."""
    extrapolated: list[Measurement] = field(default_factory=list[Measurement])
    """Measurements of recorded sessions with whole prompts. The time of naive rows is an
    estimate."""
    comparisons: list[TrlComparison] = field(default_factory=list[TrlComparison])
    trl_version: str = ""
    notes: list[str] = field(default_factory=list[str])
    """Further lines, such as which part was skipped and why."""

    def sections(self) -> list[Section]:
        """Return a section for each kind of measurement that was taken."""
        sections: list[Section] = []
        if self.shapes:
            sections.append(Section(_ABOUT_SHAPES, *create_variants_table(self.shapes)))
        if self.sessions:
            sections.append(Section(_ABOUT_SESSIONS, *create_variants_table(self.sessions)))
        if self.extrapolated:
            table = create_variants_table(self.extrapolated)
            sections.append(Section(_ABOUT_EXTRAPOLATED, *table))
        if self.comparisons:
            explanation = _ABOUT_TRL.format(version=self.trl_version)
            sections.append(Section(explanation, *create_trl_table(self.comparisons)))
        return sections

    def goals(self) -> list[tuple[str, bool]]:
        """Return (sentence, is reached) for each goal."""
        return [
            (f"{goal}: {value:.2f}, goal at least {minimum}", value >= minimum)
            for goal, value, minimum in self._goal_values()
        ]

    def _goal_values(self) -> Iterator[tuple[str, float, float]]:
        """Yield the name of each goal, the measured value, and the smallest value allowed."""
        for measurement in self.shapes:
            name = measurement.case.name
            if OURS in measurement.samples and name in GOALS:
                goal = f"{name}, times as fast as {next(iter(measurement.samples))}"
                yield goal, measurement.speed(OURS), GOALS[name]
        for comparison in self.comparisons:
            goal = f"{comparison.case.name}, times TRL's tokens per second"
            yield goal, comparison.speed("ours"), TRL_GOAL


def create_variants_table(
    measurements: Sequence[Measurement],
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with one column for each variant."""
    header = ["calls", "rho", *measurements[0].samples]
    rows = [
        [one.case.name, f"{one.case.rho:.2f}", *(_variant_cell(one, name) for name in one.samples)]
        for one in measurements
    ]
    return header, rows


def _variant_cell(measurement: Measurement, variant: str) -> str:
    sample = measurement.samples[variant]
    speed = f"{measurement.speed(variant):.2f}x, {sample.median_s:.2f} s"
    return f"{speed}, {sample.peak_mb:.0f} MB, {sample.tokens / 1000:.1f}k"


def create_trl_table(comparisons: Sequence[TrlComparison]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table with one column for each trainer."""
    rows = [
        [
            one.case.name,
            *(_trainer_cell(one, name) for name in TRAINERS),
            f"{one.gradient_difference:.0e}",
        ]
        for one in comparisons
    ]
    return ["calls", *TRAINERS, "gradients differ by"], rows


def _trainer_cell(comparison: TrlComparison, name: str) -> str:
    sample = comparison.samples[name]
    speed = f"{comparison.speed(name):.2f}x, {comparison.trained_per_s(name):.0f} tokens/s"
    return f"{speed}, {sample.peak_mb:.0f} MB, {sample.tokens / 1000:.1f}k"


_ABOUT_SHAPES = (
    "Forward and backward pass. Each cell has the speed as a multiple of the first variant's, the "
    "CPU time, the peak memory, and the tokens that went through the model, including padding. The "
    "speed is the median over rounds, in which the variants ran one after the other. The machine "
    "is shared, so the seconds say little. P is the length of the prompt, R that of each response, "
    "and O that of the observed tokens between turns; N is the number of siblings, and T the "
    f"number of turns. Pieces have at most {BUDGET} tokens. `naive` computes the calls row by row. "
    "`flat merge` makes one row of a call and the calls that it extends, which is AgentJet's "
    "method where token ids agree. The other variants merge all calls and differ in their "
    "attention. `quickest` is what the trainer uses: chains, or rows if almost nothing is shared."
)
_ABOUT_SESSIONS = (
    "Recorded opencode sessions, rendered with the demo's tokenizer and chat template. Only "
    "sessions in which a later request contains an answer are used. The answers are the recorded "
    "ones. The other 7 siblings of each call have random tokens and the same length. An answer "
    "that no later request contains is random as well. The end of each system message with its "
    "tools is left out, as far as the limit on prompts requires. Pieces have at most "
    f"{SESSION_BUDGET} tokens."
)
_ABOUT_EXTRAPOLATED = (
    "The same sessions with whole prompts, in one round. The time of naive rows is estimated: one "
    "sibling of each call was measured, and its time multiplied by 8, because all siblings are "
    "equally long. Our variant is measured over all siblings. Pieces have at most twice the length "
    "of the longest prompt."
)
_ABOUT_TRL = (
    "A whole training step of TRL {version}'s GRPOTrainer and of ours, in turns, on the same "
    "model, samples and advantages, in float32: loss, backward pass, clipping and optimizer, "
    "without sampling. Each cell has the speed as a multiple of TRL's, the trained tokens (those "
    "of responses) per CPU second, the peak memory, and the tokens that went through the model. "
    "TRL runs with its defaults: 8 rows per pass, prompts padded on the left and answers on the "
    "right to the longest of the step, logits of answers only, one iteration, no old "
    "log-probabilities. Checkpointing and bf16 are off. `ours, rows` shares nothing."
)
