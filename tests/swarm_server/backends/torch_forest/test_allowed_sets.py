"""Log-probabilities and entropies over the allowed token sets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from swarm_server.backends.torch_forest.tiny_models import (
    build_model,
    gradient_of,
    llama,
    mask_to_sets,
)
from swarm_server.forest.call_sets import packed_set
from torch import Tensor

from fakevllm_server.backends.torch_forest.edge_log_probs import HeadTokenSets, edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import CallTokens, build_forest

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-9}
ONE, FEW, MOST = packed_set(4), packed_set(4, 5, 6), packed_set(*range(1, 10))
IDS, SPANS = [1, 2, 3, 4, 5], [(3, 5)]
CALLS = [
    CallTokens(IDS, SPANS),
    CallTokens(IDS, SPANS, allowed_sets=[None, None, None, FEW, MOST]),
    CallTokens(IDS, SPANS, allowed_sets=[None, None, None, MOST, None]),
    CallTokens(IDS, SPANS, temperature=0.5, allowed_sets=[None, None, None, FEW, FEW]),
    CallTokens(IDS, SPANS, allowed_sets=[None, None, None, ONE, FEW]),
]
"""One sequence, sampled under five different constraints."""


@cache
def model_of_all() -> Any:
    return build_model(llama)


def test_calls_with_different_grammars_share_states_but_no_heads() -> None:
    forest = build_forest(CALLS)
    assert forest.num_nodes == 5
    by_node = [forest.edges.head_node.count(node) for node in (2, 3)]
    assert by_node == [5, 4]  # The first and the third call share the head of their last token.


def entropies(model: Any, call: CallTokens) -> Tensor:
    """Return the entropy at each trained token, [trained tokens], with 0 · log 0 = 0."""
    ids = torch.tensor([list(call.ids)])
    logits = mask_to_sets(model(ids).logits[0, :-1] / call.temperature, call)[2:]
    return torch.stack(
        [torch.distributions.Categorical(logits=row[row > -torch.inf]).entropy() for row in logits]
    )


@pytest.mark.parametrize("max_logits", [None, 1, 25])
def test_entropies_and_their_gradients_are_those_over_the_allowed_sets(
    max_logits: int | None,
) -> None:
    model = model_of_all()
    plan = Plan.of(build_forest(CALLS))
    values = edge_values(model, plan, "chains", with_entropy=True, max_logits=max_logits)
    assert values.entropy is not None
    expected = torch.cat([entropies(model, call) for call in CALLS])
    actual = plan.flat(values.entropy)
    torch.testing.assert_close(actual, expected, **CLOSE)
    actual_gradient = gradient_of(model, actual.sum())
    expected_gradient = gradient_of(model, expected.sum())
    assert expected_gradient.norm() > 0
    torch.testing.assert_close(actual_gradient, expected_gradient, **CLOSE)


def test_a_forced_token_has_probability_one_and_no_gradient() -> None:
    model = model_of_all()
    call = CallTokens([1, 2, 3, 4], [(3, 4)], allowed_sets=[None, None, None, ONE])
    values = edge_values(model, Plan.of(build_forest([call])), "chains", with_entropy=True)
    assert values.entropy is not None
    assert (values.log_prob.item(), values.entropy.item()) == (0.0, 0.0)
    both = values.log_prob.sum() + 3 * values.entropy.sum()
    assert gradient_of(model, both).norm() == 0


def test_a_set_shorter_or_longer_than_the_vocabulary_is_read() -> None:
    """A tokenizer's vocabulary may be shorter than the model's or, padded to bytes, longer."""
    outside = HeadTokenSets([packed_set(1, 15), packed_set(0)], [1, -1, 0]).disallowed(
        torch.zeros(3, 11)
    )
    assert outside is not None
    assert [[id for id in range(11) if not row[id]] for row in outside] == [
        [0],
        list(range(11)),
        [1],
    ]


def test_heads_without_a_set_need_no_mask() -> None:
    assert HeadTokenSets([packed_set(1)], [-1, -1]).disallowed(torch.zeros(2, 11)) is None
