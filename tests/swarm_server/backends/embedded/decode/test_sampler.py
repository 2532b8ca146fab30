from __future__ import annotations

import math

import pytest
import torch

from fakevllm_server.backends.embedded.decode.sampler import SampledTokens, SamplingRows, sample
from fakevllm_server.types.sampling import Sampling

PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor([[math.log(p) + 3.0 for p in PROBABILITIES]])
GRID = [(i + 0.5) / 200 for i in range(200)]
"""One number per 0.5 % of the unit interval, so that the shares of tokens are exact and not
random."""


def drawn(sampling: Sampling, uniforms: list[float] = GRID) -> SampledTokens:
    rows = SamplingRows.of([sampling] * len(uniforms), torch.device("cpu"))
    return sample(LOGITS.expand(len(uniforms), -1), rows, uniforms)


def shares(sampled: SampledTokens) -> list[float]:
    return [sampled.ids.count(id) / len(sampled.ids) for id in range(len(PROBABILITIES))]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    assert shares(drawn(Sampling())) == pytest.approx(PROBABILITIES, abs=0.006)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.79), [0, 1]),
        (Sampling(top_p=0.81), [0, 1, 2]),
        (Sampling(min_p=0.2), [0, 1, 2]),
        (Sampling(min_p=0.5), [0, 1]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
    ],
)
def test_excluded_tokens_are_never_drawn_and_the_rest_is_renormalized(
    sampling: Sampling, kept: list[int]
) -> None:
    sampled = drawn(sampling, [0.0, *GRID, 1 - 2**-53])

    mass = sum(PROBABILITIES[id] for id in kept)
    expected = [PROBABILITIES[id] / mass if id in kept else 0 for id in range(4)]
    assert set(sampled.ids) == set(kept)
    assert shares(sampled) == pytest.approx(expected, abs=0.01)
    for id, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
        assert logprob == pytest.approx(math.log(PROBABILITIES[id] / mass), abs=1e-5)


def test_temperature_sharpens_and_the_logprob_is_of_the_sharpened_distribution() -> None:
    sampled = drawn(Sampling(temperature=0.5))

    squares = [p**2 for p in PROBABILITIES]
    expected = [square / sum(squares) for square in squares]
    assert shares(sampled) == pytest.approx(expected, abs=0.006)
    assert sampled.logprobs[0] == pytest.approx(math.log(expected[sampled.ids[0]]), abs=1e-5)


def test_a_greedy_row_takes_the_likeliest_token_with_its_raw_logprob() -> None:
    sampled = drawn(Sampling(temperature=0, top_p=0.3, top_k=1))

    assert set(sampled.ids) == {0}
    assert sampled.logprobs[0] == pytest.approx(math.log(0.5), abs=1e-5)


def test_rows_of_a_batch_keep_their_own_settings() -> None:
    settings = [Sampling(temperature=0), Sampling(top_k=1), Sampling(), Sampling(temperature=2.0)]
    rows = SamplingRows.of(settings, torch.device("cpu"))

    together = sample(LOGITS.expand(4, -1), rows, [0.97] * 4)

    alone = [drawn(setting, [0.97]) for setting in settings]
    assert together.ids == [one.ids[0] for one in alone] == [0, 0, 3, 3]
    assert together.logprobs == pytest.approx([one.logprobs[0] for one in alone])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    extremes = [0.0, 0.5, 0.5 + 2**-53, 1 - 2**-53]
    rows = SamplingRows.of([Sampling()] * 4, torch.device("cpu"))

    assert set(sample(logits.expand(4, -1), rows, extremes).ids) <= {1, 3}


def test_each_row_gets_the_requested_number_of_top_logprobs() -> None:
    settings = [Sampling(), Sampling(top_logprobs=2), Sampling(top_logprobs=9, top_k=1)]
    rows = SamplingRows.of(settings, torch.device("cpu"))

    tops = sample(LOGITS.expand(3, -1), rows, [0.1] * 3).top_logprobs

    assert tops[0] == []
    assert [id for id, _ in tops[1]] == [0, 1]
    assert [round(logprob, 4) for _, logprob in tops[1]] == [-0.6931, -1.204]
    assert len(tops[2]) == 4, "no more than the vocabulary"
    assert all(math.isfinite(logprob) for _, logprob in tops[2])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-45),
        Sampling(temperature=-1.0),
        Sampling(top_p=0.0),
        Sampling(min_p=2.0),
        Sampling(top_k=-5),
        Sampling(top_logprobs=-1),
    ],
)
def test_no_sampling_setting_raises(sampling: Sampling) -> None:
    sampled = drawn(sampling, [0.0, 1 - 2**-53])

    assert set(sampled.ids) <= {0, 1, 2, 3}
    assert all(math.isfinite(logprob) for logprob in sampled.logprobs)
    assert sampled.top_logprobs == [[], []]


def test_nan_logits_still_give_a_token() -> None:
    logits = torch.tensor([[torch.nan] * 3, [0.0, torch.inf, torch.nan]])
    rows = SamplingRows.of([Sampling()] * 2, torch.device("cpu"))

    ids = sample(logits, rows, [1 - 2**-53] * 2).ids

    assert ids[0] in {0, 1, 2} and ids[1] == 1
