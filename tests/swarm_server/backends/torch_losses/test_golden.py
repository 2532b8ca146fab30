"""Losses and KL estimates, compared with golden numbers from verl 0.9.1's own functions in
float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from swarm_server.backends.torch_losses.scored_calls import GOLDEN, ScoredCall, spec_of, whole

from fakevllm_server.backends.torch_losses.kl import kl_loss

CLOSE = 1e-5


def vanilla(**settings: Any) -> dict[str, Any]:
    return {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2} | settings


@pytest.mark.parametrize(
    ("name", "settings", "loss"),
    [
        ("vanilla", vanilla(), 0.963924),
        ("vanilla", vanilla(loss_agg_mode="token-sum"), 5.783542),
        ("vanilla", vanilla(loss_agg_mode="seq-mean-token-sum"), 1.927847),
        ("vanilla", vanilla(loss_agg_mode="seq-mean-token-mean"), 1.868126),
        ("vanilla", vanilla(loss_agg_mode="seq-mean-token-sum-norm"), 0.642616),
        ("vanilla", {}, 0.950590),
        ("gspo", {}, 1.944444),
        ("sapo", {}, 1.953632),
        ("gpg", {}, 0.308333),
        ("cispo", {}, 0.237040),
        ("geo_mean", {}, 1.944444),
    ],
)
def test_losses_equal_those_of_verl(name: str, settings: dict[str, Any], loss: float) -> None:
    assert whole(GOLDEN, spec_of(name, **settings))[0].loss.item() == pytest.approx(loss, abs=CLOSE)


@pytest.mark.parametrize(
    ("name", "settings", "gradient"),
    [
        ("vanilla", vanilla(), [0, -0.123470, 0, 0.137393, 0.083333, 0]),
        ("gspo", {}, [-0.166667, -0.166667, 0.057439, 0.057439, 0.057439, 2.105462]),
        ("sapo", {}, [-0.218230, -0.121419, 0.036146, 0.081742, 0.055556, 0.717030]),
        ("gpg", {}, [-0.166667, -0.166667, 0.083333, 0.083333, 0.083333, 0.333333]),
        ("cispo", {}, [-0.2, -0.123470, 0.055860, 0.1, 0.083333, 0.4]),
        ("geo_mean", {}, [-0.166667, -0.166667, 0.057439, 0.057439, 0.057439, 2.105462]),
    ],
)
def test_gradients_equal_those_of_verl_and_clipped_tokens_have_none(
    name: str, settings: dict[str, Any], gradient: list[float]
) -> None:
    assert whole(GOLDEN, spec_of(name, **settings))[1] == pytest.approx(gradient, abs=CLOSE)


def test_clipped_tokens_are_counted_as_verl_does() -> None:
    metrics = whole(GOLDEN, spec_of("vanilla", **vanilla()))[0].metrics
    assert metrics["clip_fraction"].item() == pytest.approx(0.3333, abs=1e-4)
    assert metrics["clip_fraction_lower"].item() == pytest.approx(0.1667, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", [0.2, 0.4, -0.5], [1, 1, 1]),
        ("k2", [0.02, 0.08, 0.125], [0.2, 0.4, -0.5]),
        ("k3", [0.018731, 0.070320, 0.148721], [0.181269, 0.329680, -0.648721]),
        ("low_var_kl", [0.018731, 0.070320, 0.148721], [0.181269, 0.329680, -0.648721]),
        ("k3+", [0.018731, 0.070320, 0.148721], [0.2, 0.4, -0.5]),
    ],
)
def test_kl_and_its_gradient_equal_those_of_verl(
    name: str, value: list[float], gradient: list[float]
) -> None:
    log_prob = torch.tensor([-1, -0.5, -2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.2, -0.9, -1.5], dtype=torch.float64)

    kl = kl_loss(log_prob, reference, name)
    kl.sum().backward()

    assert kl.tolist() == pytest.approx(value, abs=CLOSE)
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx(gradient, abs=CLOSE)


ROWS = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 7], [0, 1, 2, 8], [0, 1, 2, 3, 4, 5, 6]]
TRIE = [
    ScoredCall([-1, -1], [-1, -1], 1.0, "a"),
    ScoredCall([-1, -1], [-1, -1], -0.5, "b"),
    ScoredCall([-1], [-1], -0.5, "c"),
    ScoredCall([-1], [-1], 0.25, "d"),
]
"""The calls [1,2,3|4,5], [1,2,3|4,6], [1,2,3|7], [1,2,3,4,5,9|8]. ROWS lists for each call its
nodes in their trie of nine nodes."""


def on_nodes(calls: list[ScoredCall], **settings: Any) -> list[float]:
    """Return the gradient of each node's log-probability: the sum over the calls through it."""
    gradient = iter(whole(calls, spec_of("vanilla", **settings))[1])
    nodes = [0.0] * 9
    for call, row in zip(calls, ROWS, strict=True):
        for node in row[-len(call.new) :]:
            nodes[node] += next(gradient)
    return nodes


def test_the_golden_trie_on_policy_equals_golden_numbers() -> None:
    assert on_nodes(TRIE, loss_agg_mode="token-mean") == pytest.approx(
        [0, 0, 0, -0.083333, -0.166667, 0, -0.041667, 0.083333, 0.083333], abs=CLOSE
    )
    assert on_nodes(TRIE, loss_agg_mode="seq-mean-token-mean") == pytest.approx(
        [0, 0, 0, -0.0625, -0.125, 0, -0.0625, 0.0625, 0.125], abs=CLOSE
    )


def test_the_golden_trie_off_policy_is_clipped_call_by_call() -> None:
    far = [replace(call, logprobs=[-1.0 - 0.4054651] * len(call.logprobs)) for call in TRIE]
    assert on_nodes(far) == pytest.approx([0, 0, 0, 0.125, 0, 0, 0, 0.125, 0.125], abs=CLOSE)
