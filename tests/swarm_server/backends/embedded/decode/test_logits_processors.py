"""Penalties, biases and bans, compared with a plain computation of vLLM's definitions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_server.backends.embedded.decode.logits_processors import (
    LogitsProcessor,
    needs_logits_processor,
    process_logits,
)
from fakevllm_server.types.sampling import Sampling

VOCABULARY = 12
EOS = frozenset({2})
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


def plain(logits: list[float], prompt: list[int], answer: list[int], how: Sampling) -> list[float]:
    """Compute the logits token by token, by the definitions of vLLM and OpenAI."""
    out: list[float] = []
    for id, logit in enumerate(logits):
        if how.allowed_ids is not None and id not in how.allowed_ids:
            logit = -torch.inf
        if len(answer) < how.min_tokens and id in EOS | how.stop_ids:
            logit = -torch.inf
        logit += how.logit_bias.get(id, 0.0)
        if id in prompt or id in answer:
            penalty = how.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= how.frequency_penalty * answer.count(id)
        logit -= how.presence_penalty * (id in answer)
        out.append(logit)
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    ids,
    ids,
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.1, 3),
    st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
    st.integers(0, 4),
)
def test_all_rules_together_equal_the_plain_computation(
    logits: list[float],
    prompt: list[int],
    answer: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    how = Sampling(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_ids=frozenset({5, 999}),
        allowed_ids=(0, 1, 2, 5, 7, 8),
    )
    bend = LogitsProcessor(how, prompt, EOS)
    half = len(answer) // 2
    for id in answer[:half]:
        bend.take(id)
    bend.apply(torch.tensor(logits))  # so that what is kept between turns is there
    for id in answer[half:]:
        bend.take(id)

    row = torch.tensor(logits)
    bend.apply(row)

    assert row.tolist() == pytest.approx(plain(logits, prompt, answer, how), abs=1e-3)


def test_rows_without_a_logits_processor_keep_their_logits_bit_by_bit() -> None:
    logits = torch.randn(3, VOCABULARY)
    bend = LogitsProcessor(Sampling(logit_bias={1: 5.0}), [0], EOS)

    out = process_logits(logits, [(1, bend)])

    assert torch.equal(out[0], logits[0]) and torch.equal(out[2], logits[2])
    assert out[1, 1] == logits[1, 1] + 5 and not torch.equal(out, logits)


def test_a_bad_word_is_never_finished() -> None:
    bend = LogitsProcessor(Sampling(bad_words=("x",)), [], EOS, bad_words=[[4], [6, 7]])
    banned: list[set[int]] = []
    for id in (6, 3, 6):
        bend.take(id)
        row = torch.zeros(VOCABULARY)
        bend.apply(row)
        banned.append({at for at, value in enumerate(row.tolist()) if value == -torch.inf})

    assert banned == [{4, 7}, {4}, {4, 7}]


def test_the_end_of_sequence_is_sampled_if_no_token_is_allowed() -> None:
    row = torch.randn(VOCABULARY)
    LogitsProcessor(Sampling(allowed_ids=(5,), bad_words=("x",)), [], EOS, bad_words=[[5]]).apply(
        row
    )

    assert row.argmax().item() == 2 and torch.softmax(row, -1)[2] == 1


def test_only_settings_that_change_logits_need_a_logits_processor() -> None:
    rng = random.Random(0)
    cuts = Sampling(temperature=rng.random(), top_p=0.5, top_k=3, stop_ids=frozenset({1}), seed=1)
    assert not needs_logits_processor(cuts) and not needs_logits_processor(
        Sampling(repetition_penalty=1.0)
    )
    assert needs_logits_processor(Sampling(presence_penalty=-0.1)) and needs_logits_processor(
        Sampling(min_tokens=1)
    )
