"""The trainer's passes over a step's pieces, in float64."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import finish, pieces
from swarm_server.backends.torch_forest.tiny_models import (
    VOCAB,
    build_model,
    gathered_gradient,
    llama,
)

from fakevllm_server.backends.embedded.train.forward_backward import Passes
from fakevllm_server.types.backend import Call, LossSpec

SEQUENCE_LEVEL = LossSpec("gspo", 0.2, 0.3, loss_unit="timeline", entropy_coeff=0.01)
"""A loss that couples the tokens of a unit."""
NORMALIZED = LossSpec(
    "gpg", rollout_is="token", rollout_is_batch_normalize=True, entropy_coeff=0.01
)
"""A loss that couples all tokens of a step."""


@cache
def shared_model() -> Any:
    return build_model(llama)


def family() -> list[Call]:
    """Return siblings of two prompts, in three units that each have calls of both prompts."""
    rng = random.Random(0)

    def ids(number: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(number)]

    calls: list[Call] = []
    for group in range(2):
        prompt = ids(6)
        for index in range(6):
            response = ids(rng.randrange(1, 7))
            logprobs = [rng.uniform(-3, -1.5) for _ in response]
            advantage, unit = (-1.0) ** index * rng.uniform(0.5, 2), f"u{index % 3}"
            calls.append(
                Call(f"g{group}", prompt, response, logprobs, 0, 1.0, advantage, 1.0, unit=unit)
            )
    return calls


@pytest.mark.parametrize("max_tokens", [8, 14, 25])
@pytest.mark.parametrize("spec", [SEQUENCE_LEVEL, NORMALIZED], ids=["gspo", "normalized"])
@pytest.mark.parametrize("is_first", [True, False])
def test_pieces_of_a_coupled_loss_have_the_loss_and_gradient_of_one_piece(
    spec: LossSpec, max_tokens: int, is_first: bool
) -> None:
    model = shared_model()
    cut, whole = pieces(family(), max_tokens, spec), pieces(family(), 10_000, spec)
    assert cut.whole is not None and len(cut.pieces) > 1, "the loss couples different pieces"
    assert whole.whole is None and len(whole.pieces) == 1

    metrics = finish(Passes(model, "chains").backward(cut, spec, is_first=is_first))
    actual = gathered_gradient(model)
    expected_metrics = finish(Passes(model, "chains").backward(whole, spec, is_first=is_first))
    expected = gathered_gradient(model)

    assert expected.norm() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-9)
