"""The demonstrations of a micro-batch as tensors, for the demonstration losses.

A *row* is one demonstration. The log-probability of a row is the sum over the tokens of its
response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fakevllm_server.types.demonstrations import KINDS, Demonstration

SIGNS = {
    "plain": 1.0,
    "chosen": 1.0,
    "desirable": 1.0,
    "rejected": -1.0,
    "undesirable": -1.0,
    "mismatched": 0.0,
}
"""The sign of each kind of demonstration, as in `DemonstrationRows.signs`."""


class DemonstrationLoss(NamedTuple):
    """The demonstration loss of one micro-batch. The losses of a step's micro-batches add up to the
    step's loss."""

    loss: Tensor
    """The micro-batch's part of the step's loss, as a scalar tensor."""
    metrics: dict[str, Tensor]
    """Scalars without a gradient. The values of the micro-batches add up to the step's value."""


@dataclass(frozen=True, slots=True)
class DemonstrationRows:
    """The demonstrations of one micro-batch as tensors. Each row is one demonstration."""

    row_of_token: Tensor
    """[tokens] Index of the row of each trained token of the micro-batch. Tokens of sampled calls,
    which belong to no row, have the index `len(signs)`."""
    signs: Tensor
    """[rows] 1 for a response to imitate, -1 for a response to avoid, 0 for a mismatched pair."""
    pairs: Tensor
    """[rows] Index of the row's pair within the micro-batch; 0 for rows without a pair."""
    num_pairs: int
    """Number of pairs in the micro-batch."""
    step_tokens: int
    """Number of tokens in all rows of the step."""
    step_pairs: int
    """Number of pairs of the step."""
    step_rows: int
    """Number of rows of the step, without mismatched pairs."""
    is_whole: bool
    """Whether this micro-batch is complete: it contains all rows that the loss couples with its
    rows."""

    @staticmethod
    def of(
        num_tokens: Sequence[int],
        own: Sequence[Demonstration | None],
        step: Sequence[Demonstration],
        loss: str,
        *,
        device: torch.device | str = "cpu",
    ) -> DemonstrationRows | None:
        """Return the DemonstrationRows of a micro-batch: its demonstrations as tensors. Return None
        if the micro-batch has no demonstration.

        `num_tokens` has the number of trained tokens of each call of the micro-batch. `own` has the
        demonstration of each of these calls, or None for a call that is trained with the policy
        loss. `step` has all demonstrations of the step. `loss` is the name of the demonstration
        loss.

        Raises ValueError if a demonstration has a kind that this loss does not train.
        """
        rows = [one for one in own if one is not None]
        wrong = {row.kind for row in step} - KINDS[loss]
        if wrong:
            raise ValueError(f"the loss {loss} does not train {', '.join(sorted(wrong))} answers")
        if not rows:
            return None
        numbers = iter(range(len(rows)))
        row_of_call = [len(rows) if one is None else next(numbers) for one in own]
        pairs = list(dict.fromkeys(row.pair for row in rows))
        return DemonstrationRows(
            row_of_token=torch.tensor(row_of_call)
            .repeat_interleave(torch.tensor(num_tokens))
            .to(device),
            signs=torch.tensor([SIGNS[row.kind] for row in rows]).to(device),
            pairs=torch.tensor([pairs.index(row.pair) for row in rows]).to(device),
            num_pairs=len(pairs),
            step_tokens=sum(len(row.response_ids) for row in step),
            step_pairs=len({row.pair for row in step}),
            step_rows=sum(row.kind != "mismatched" for row in step),
            is_whole=_is_whole(rows, step, loss),
        )

    def sums(self, log_prob: Tensor) -> Tensor:
        """Return the log-probability of each row's response: the sum over the response's tokens. A
        row is a demonstration. `log_prob` has one value for each trained token of the
        micro-batch."""
        num_rows = len(self.signs)
        sums = log_prob.new_zeros(num_rows + 1).index_add(0, self.row_of_token, log_prob)
        return sums[:num_rows]


def _is_whole(rows: Sequence[Demonstration], step: Sequence[Demonstration], loss: str) -> bool:
    if loss == "sft":
        return True
    if loss == "kto":
        return len(rows) == len(step)
    in_step = Counter(row.pair for row in step)
    return all(in_step[pair] == count for pair, count in Counter(row.pair for row in rows).items())
