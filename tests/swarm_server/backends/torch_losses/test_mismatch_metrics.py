"""Mismatch metrics of trainer and engine, compared with the formulas written out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.backends.torch_losses.mismatch_metrics import Mismatch, MismatchSums

NAMES = ("mismatch", "mismatch_k3", "mismatch_large", "ess")
ENGINE = [-1.0, -2.0, -0.5, -1.5, -0.2, -1.2]
TRAINER = [-0.9, -2.7, -1.0, -0.4, -0.2, -0.1]


def metrics_of(share: list[float], is_equal: list[bool] | None = None) -> dict[str, float]:
    equal = torch.tensor(is_equal or [False] * len(share))
    return Mismatch.of(
        torch.tensor(TRAINER), torch.tensor(ENGINE), torch.tensor(share), equal
    ).metrics


def test_equal_shares_give_the_plain_formulas() -> None:
    differences = [now - then for now, then in zip(TRAINER, ENGINE, strict=True)]
    weights = [math.exp(value) for value in differences]
    metrics = metrics_of([1 / 6] * 6)

    assert metrics["mismatch"] == pytest.approx(sum(map(abs, differences)) / 6)
    assert metrics["mismatch_k3"] == pytest.approx(
        sum(w - d - 1 for w, d in zip(weights, differences, strict=True)) / 6
    )
    assert metrics["mismatch_large"] == pytest.approx(3 / 6)
    assert metrics["ess"] == pytest.approx(sum(weights) ** 2 / (6 * sum(w * w for w in weights)))
    assert metrics["equal_version"] == 0


def test_a_token_with_a_double_share_counts_as_two_tokens() -> None:
    metrics = metrics_of([0.25, 0.125, 0.125, 0.125, 0.25, 0.125])
    repeated = [0, 0, 1, 2, 3, 4, 4, 5]
    twice = Mismatch.of(
        torch.tensor(TRAINER)[repeated],
        torch.tensor(ENGINE)[repeated],
        torch.full((8,), 1 / 8),
        torch.zeros(8, dtype=torch.bool),
    ).metrics
    assert metrics == pytest.approx(twice)


def test_metrics_are_of_the_tokens_of_the_current_weights_and_name_their_share() -> None:
    share = [1 / 6] * 6
    metrics = metrics_of(share, [False, False, False, False, True, True])
    alone = MismatchSums.of(
        torch.tensor(TRAINER[4:]), torch.tensor(ENGINE[4:]), torch.tensor(share[4:])
    )

    assert metrics == pytest.approx(alone.metrics | {"equal_version": 1 / 3})
    assert metrics["mismatch"] == pytest.approx(1.1 / 2)


def test_without_tokens_of_the_current_weights_the_metrics_are_of_all_tokens() -> None:
    share = [1 / 6] * 6
    metrics, every = metrics_of(share), metrics_of(share, [True] * 6)
    assert {name: metrics[name] for name in NAMES} == {name: every[name] for name in NAMES}
    assert (metrics["equal_version"], every["equal_version"]) == (0, pytest.approx(1))


def test_equal_log_probs_have_an_effective_sample_size_of_one() -> None:
    same = torch.tensor(ENGINE)
    metrics = Mismatch.of(
        same, same, torch.full((6,), 1 / 6), torch.ones(6, dtype=torch.bool)
    ).metrics
    assert metrics == pytest.approx(dict.fromkeys(NAMES, 0.0) | {"ess": 1.0, "equal_version": 1.0})


@given(
    tokens=st.lists(
        st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.sampled_from([0.25, 1.0]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    cuts=st.sets(st.integers(0, 12)),
)
def test_the_metrics_do_not_depend_on_the_cut(
    tokens: list[tuple[float, float, float, bool]], cuts: set[int]
) -> None:
    columns = [torch.tensor(column) for column in zip(*tokens, strict=True)]
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    parts = [
        Mismatch.of(*(column[start:end] for column in columns)) for start, end in pairwise(edges)
    ]
    whole = Mismatch.of(*columns)
    assert Mismatch.joined(parts).metrics == pytest.approx(whole.metrics)
    assert 0 <= whole.metrics["ess"] <= 1 + 1e-9


def test_no_tokens_give_no_metrics() -> None:
    empty = torch.empty(0)
    metrics = Mismatch.of(empty, empty, empty, torch.empty(0, dtype=torch.bool)).metrics
    assert metrics == {}
