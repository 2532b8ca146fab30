"""The last look at a step's pieces before they are trained on: each call once, each token true."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fakevllm_server.backends.embedded.train.step_pieces import StepPieces
from fakevllm_server.backends.torch_forest.fidelity import fidelity
from fakevllm_server.types.backend import BackendError, Call


class FidelityError(BackendError):
    """What would be trained is not what was sampled; nothing has been."""


def token_fidelity(step: StepPieces, calls: Sequence[Call]) -> float:
    """The share of tokens that are what was recorded, which is 1. Raises FidelityError for less."""
    if sorted(index for piece in step.pieces for index in piece.calls) != list(range(len(calls))):
        raise FidelityError("token_fidelity: the step's pieces do not hold each call once")
    found = [
        fidelity(piece.plan, [calls[index] for index in piece.calls], piece.tokens.sampled_log_prob)
        for piece in step.pieces
    ]
    share = sum(one.num_true for one in found) / max(sum(one.num_tokens for one in found), 1)
    for number, one in enumerate(found):
        if one.fault is not None:
            where = f"piece {number}: {one.fault}"
            raise FidelityError(f"nothing is trained, token_fidelity is {share:.6g}. {where}")
    _check_whole(step)
    return 1.0


def _check_whole(step: StepPieces) -> None:
    """Where a loss couples pieces it takes all tokens at once: they are the pieces', in order."""
    if step.whole is None:
        return
    parts = torch.cat([piece.tokens.sampled_log_prob for piece in step.pieces])
    if not torch.equal(step.whole.sampled_log_prob, parts):
        raise FidelityError("token_fidelity: the whole step's tokens are not those of its pieces")
