"""Check the pieces (sets of calls that go through the model together) of a training step before
training. Each call must be in exactly one piece. Each token must equal the token that the rollout
engine has recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fakevllm_server.backends.embedded.train.micro_batches import StepPieces
from fakevllm_server.backends.torch_forest.plan_check import check_plan
from fakevllm_server.types.backend import BackendError, Call


class FidelityError(BackendError):
    """Raised if the tokens of a training step differ from the recorded tokens. The tokens are
    checked before training, so no weight has changed."""


def token_fidelity(step: StepPieces, calls: Sequence[Call]) -> float:
    """Check that the tokens of all pieces of a step are the recorded tokens. A piece is a set of
    calls that go through the model together. Return 1.0 for the step's metric `token_fidelity`, the
    share of correct tokens. Raises FidelityError if a token differs, or if a call is not in exactly
    one piece."""
    if sorted(index for piece in step.pieces for index in piece.calls) != list(range(len(calls))):
        raise FidelityError("token_fidelity: the step's pieces do not hold each call once")
    results = [
        check_plan(
            piece.plan, [calls[index] for index in piece.calls], piece.tokens.sampled_log_prob
        )
        for piece in step.pieces
    ]
    num_tokens = sum(result.num_tokens for result in results)
    share = sum(result.num_correct for result in results) / max(num_tokens, 1)
    for number, result in enumerate(results):
        if result.fault is not None:
            where = f"piece {number}: {result.fault}"
            raise FidelityError(f"nothing is trained, token_fidelity is {share:.6g}. {where}")
    _check_whole(step)
    return 1.0


def _check_whole(step: StepPieces) -> None:
    """Raise FidelityError if `step.whole` does not have the log-probabilities of all pieces in
    order. A piece is a set of calls that go through the model together. `step.whole` is None if the
    loss does not couple tokens of different pieces."""
    if step.whole is None:
        return
    parts = torch.cat([piece.tokens.sampled_log_prob for piece in step.pieces])
    if not torch.equal(step.whole.sampled_log_prob, parts):
        raise FidelityError("token_fidelity: the whole step's tokens are not those of its pieces")
