"""The rows of a mini-batch with everything that the loss reads of them, in the trainer's process. A
row is one call, or one demonstration. A training step has one mini-batch or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fakevllm_server.algorithms.loss_sequences import CallShare
from fakevllm_server.backends.torch_losses.demonstration_rows import DemonstrationRows
from fakevllm_server.backends.torch_losses.measured_loss import (
    MeasuredLoss,
    PartMetrics,
    joined_metrics,
    measured_loss,
)
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.backends.training.step_calls import demonstration_calls, shares_of
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.worker_loss import COEFFICIENT, ENTROPY_COEFFICIENT
from fakevllm_server.types.backend import Call, LossSpec, StepMetrics
from fakevllm_server.types.demonstrations import Demonstration


@dataclass(frozen=True, slots=True)
class RowValues:
    """What the model says of each response token of all rows, one row after another. Each tensor
    has the shape [tokens]."""

    log_prob: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one mini-batch of a training step. Its loss and metrics are those of a step that
    has only these rows."""

    spec: LossSpec
    split: WorkerRows
    """The rows, those of the first worker first."""
    tokens: TrainedTokens
    """The response tokens of all rows, one row after another."""
    is_equal_version: Tensor
    """[tokens] For each token, whether all tokens of its call were sampled with the trainer's
    current weights."""
    is_coupled: bool
    """Whether the loss of a row depends on other rows. Such a mini-batch needs two passes."""
    share: float = 1.0
    """Share of the step's tokens that are in the mini-batch."""

    @staticmethod
    def of(
        calls: Sequence[Call],
        demonstrations: Sequence[Demonstration],
        spec: LossSpec,
        divide: Callable[[Sequence[Call]], WorkerRows],
        version: int | None,
        share: float = 1.0,
    ) -> StepRows:
        """Divide the calls and demonstrations of a mini-batch among the workers, with `divide`.
        `version` is the version of the trainer's weights. `share` is the mini-batch's share of the
        step's tokens. Raises BackendError for calls that cannot be trained."""
        as_calls = demonstration_calls(demonstrations)
        split = divide([*calls, *as_calls])
        rows = split.rows
        shares = shares_of(rows, spec)
        tokens = TrainedTokens.of(rows, shares)
        lengths = [len(row.response_ids) for row in rows]
        if spec.of_demonstrations is not None:
            pairs = zip(as_calls, demonstrations, strict=True)
            demonstration_of = {id(call): one for call, one in pairs}
            own = [demonstration_of.get(id(row)) for row in rows]
            of_step = DemonstrationRows.of(lengths, own, demonstrations, spec.of_demonstrations)
            tokens = replace(tokens, demonstrations=of_step)
        is_equal = torch.tensor([row.version == version for row in rows])
        return StepRows(
            spec,
            split,
            tokens,
            is_equal.repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
            is_coupled=_is_coupled(rows, shares, spec),
            share=share,
        )

    @property
    def rows(self) -> Sequence[Call]:
        return self.split.rows

    def with_log_probs(
        self, *, old: Tensor | None = None, reference: Tensor | None = None
    ) -> StepRows:
        """Return a copy with the log-probabilities of the old policy (the trainer's policy before
        the step) or of the reference policy. Both have the shape [tokens]."""
        tokens = self.tokens
        if old is not None:
            tokens = replace(tokens, old_log_prob=old)
        if reference is not None:
            tokens = replace(tokens, reference_log_prob=reference)
        return replace(self, tokens=tokens)

    def metrics(self, values: RowValues, *, is_first: bool) -> StepMetrics:
        """Return the metrics of an update. `is_first` is true for the step's first update, if it
        measures what is compared before it."""
        return joined_metrics([self._loss(values, is_first=is_first).metrics])

    def measure(self, values: RowValues) -> PartMetrics:
        """Return the part that the mini-batch contributes to the metrics that a step measures
        before its first update."""
        return self._loss(values, is_first=True).metrics.scaled(self.share)

    def coefficients(self, values: RowValues) -> dict[str, Tensor]:
        """Return the inputs of the second pass: the derivatives of the step's loss with respect to
        the log-probability of each token, and to its entropy if the loss has an entropy bonus."""
        leaves = {COEFFICIENT: values.log_prob.detach().requires_grad_()}
        if self.spec.entropy_coeff != 0:
            assert values.entropy is not None, "entropy_coeff needs the entropy"
            leaves[ENTROPY_COEFFICIENT] = values.entropy.detach().requires_grad_()
        with torch.enable_grad():
            leaf_values = RowValues(leaves[COEFFICIENT], leaves.get(ENTROPY_COEFFICIENT))
            loss = self._loss(leaf_values, is_first=False).loss
        if not loss.requires_grad:  # No token counts in the loss.
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, gradients, strict=True))

    def _loss(self, values: RowValues, *, is_first: bool) -> MeasuredLoss:
        return measured_loss(
            values.log_prob,
            values.entropy,
            self.tokens,
            self.is_equal_version,
            self.spec,
            is_first=is_first,
        )


def _is_coupled(rows: Sequence[Call], shares: Sequence[CallShare], spec: LossSpec) -> bool:
    """Return True if the loss of a row may depend on other rows. Demonstrations always count as
    coupled, because workers do not know the pairs of demonstrations."""
    has_split_unit = any(
        share.scale and share.unit_tokens != row.num_trained
        for row, share in zip(rows, shares, strict=True)
    )
    return (
        spec.of_demonstrations is not None
        or spec.couples_step
        or (spec.couples_tokens and has_split_unit)
    )
