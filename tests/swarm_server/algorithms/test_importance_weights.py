"""Truncated importance weights, and their effective sample size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.algorithms.importance_weights import WeightSums, truncated_weights

LOG_PROBS = st.floats(-50.0, 0.0)
BOUNDS = st.floats(0.1, 10.0)


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1), BOUNDS)
def test_a_weight_is_the_ratio_of_probabilities_and_never_above_the_bound(
    pairs: list[tuple[float, float]], bound: float
) -> None:
    now, then = zip(*pairs, strict=True)
    weights = truncated_weights(now, then, bound)
    assert list(weights) == pytest.approx([min(math.exp(a - b), bound) for a, b in pairs])
    assert max(weights) <= bound


@given(st.lists(st.lists(st.floats(0.0, 2.0)), min_size=1))
def test_the_effective_sample_size_is_a_share_of_the_weights(rows: list[list[float]]) -> None:
    weights = [weight for row in rows for weight in row]
    if not weights:
        return
    sums = WeightSums.of(rows, 2.0)
    # Cauchy and Schwarz: at most 1. At least 1 / n, unless the squares are too small for a float.
    assert 0.0 <= sums.ess <= 1.0 + 1e-9
    if max(weights) > 1e-100:
        assert sums.ess >= 1 / len(weights) - 1e-9
    assert WeightSums.of([weights], 2.0) == sums


@given(st.floats(0.01, 2.0), st.integers(1, 50))
def test_equal_weights_have_the_full_effective_sample_size(weight: float, num: int) -> None:
    assert WeightSums.of([[weight] * num], 2.0).ess == pytest.approx(1.0)


def test_weights_of_zero_have_no_effective_sample_size() -> None:
    weights = truncated_weights([-math.inf, -2000.0], [-1.0, -1.0], 2.0)
    assert (list(weights), WeightSums.of([weights], 2.0).ess) == ([0.0, 0.0], 0.0)


def test_a_huge_ratio_is_truncated_without_an_overflow() -> None:
    assert list(truncated_weights([0.0], [-5000.0], 2.0)) == [2.0]


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        truncated_weights([math.nan], [-1.0], 2.0)
