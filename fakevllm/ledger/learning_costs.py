"""What learning costs: the tokens that are sampled and trained, and the seconds of the training
steps. This module does no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Numbers of tokens of answers. The tokens of prompts are not counted.

    >>> TokenCosts(sampled=40, served=10, trained=30).ratio
    4.0
    """

    sampled: int = 0
    """Tokens of all siblings."""
    served: int = 0
    """Tokens of the answers that apps got. The apps would need about as many without learning."""
    trained: int = 0
    """Tokens of the answers that were trained."""

    @property
    def others(self) -> int:
        """Tokens of the siblings that no app got."""
        return self.sampled - self.served

    @property
    def ratio(self) -> float | None:
        """Number of tokens that were sampled for each token that apps got. None if apps got no
        tokens."""
        return self.sampled / self.served if self.served else None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of training steps. A value is None if the server measured it for no step."""

    total: float | None = None
    """Seconds from the end of the step before to the end of the step: sampling, waiting and
    training."""
    update: float | None = None
    """Seconds in which the trainer computed the new weights."""


@dataclass(frozen=True, slots=True)
class LearningCosts:
    """The costs of one training run, and those of all requests in the ledger."""

    run_tokens: TokenCosts
    run_seconds: StepSeconds
    all_tokens: TokenCosts
    """Tokens of the requests of all runs, also of those that got a single answer and were not for
    training."""
    evaluated: int
    """Tokens that were sampled for evaluations on held-out rows, in all runs."""
