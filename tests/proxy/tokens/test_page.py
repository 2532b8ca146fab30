"""A page of tokens: the loss mask, log-probabilities and advantages that training used."""

from __future__ import annotations

import doctest

import pytest

from fakevllm.tokens import colours, page
from fakevllm.tokens.colours import BAD, GOOD, ColourBy, colour
from fakevllm.tokens.page import Token, ledger_page, server_page
from fakevllm_adapters.protocol.group_tokens import CallView, GroupView, SiblingView
from tests.proxy.tokens import pages


def test_the_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(page).failed == 0
    assert doctest.testmod(colours).failed == 0


def test_prompts_are_masked_and_responses_have_their_siblings_advantage() -> None:
    better, worse = pages.page(0.5, -0.5).samples
    (call,) = better.calls
    assert list(call.prompt) == [Token(1, False), Token(2, False)]
    assert list(call.response) == [Token(3, True, -0.5, 0.5), Token(4, True, 0.0, 0.5)]
    assert [token.advantage for token in worse.calls[0].response] == [-0.5, -0.5]


def test_untrained_tokens_are_masked_and_have_no_advantage() -> None:
    (sample,) = pages.page(None).samples
    assert [token.is_trained for token in sample.calls[0].response] == [False, False]
    (sample,) = pages.page(0.5, untrainable="missing_logprob").samples
    assert [token.advantage for token in sample.calls[0].response] == [None, None]
    assert "not trained: missing_logprob" in sample.calls[0].notes


def test_the_notes_of_a_call_name_its_versions_and_its_replica() -> None:
    (sample,) = pages.page(0.5, replica="replica-2").samples
    assert sample.calls[0].notes[:3] == ["version 3–4", "replica-2", "temperature 1"]
    (sample,) = pages.page(0.5).samples
    assert sample.calls[0].notes[:2] == ["version 3–4", "temperature 1"]


def test_a_forced_token_is_not_in_the_loss() -> None:
    (sample,) = pages.page(0.5, shaped=True).samples
    assert [token.is_trained for token in sample.calls[0].response] == [True, False]


def test_a_call_without_logprobs_still_has_its_tokens() -> None:
    (sample,) = pages.page(0.5, logprobs=None).samples
    assert [token.logprob for token in sample.calls[0].response] == [None, None]


def test_a_single_sibling_can_be_selected() -> None:
    record = pages.trained_group(0.5, -0.5)
    assert [sample.name for sample in ledger_page(record, {}, 1).samples] == ["sibling 1"]
    assert ledger_page(record, {}, 7).samples == []


def test_the_facts_name_state_step_and_version() -> None:
    assert pages.page(0.5).facts == ["trained", "step 5", "made version 6"]


def test_an_episode_from_the_server_masks_the_tokens_that_the_server_calls_forced() -> None:
    view = CallView(**pages.call().model_dump(), forced=[0])
    sibling = SiblingView(
        index=0, name="abc", reward=1.0, advantage=0.5, is_trained=True, calls=[view]
    )
    server_group = server_page(
        GroupView(group_id="task:t#abc", state="consumed", siblings=[sibling])
    )
    (sample,) = server_group.samples
    assert sample.name == "episode abc"
    assert [token.is_trained for token in sample.calls[0].response] == [False, True]


@pytest.mark.parametrize(("advantage", "expected"), [(2.0, GOOD), (-1.0, BAD)])
def test_an_advantage_gives_the_colour_by_its_sign_and_the_strength_by_its_size(
    advantage: float, expected: tuple[int, int, int]
) -> None:
    token_colour = colour(Token(1, True, advantage=advantage), ColourBy.ADVANTAGE, 2.0)
    assert token_colour is not None
    assert token_colour[0] == expected
    assert token_colour[1] == (1.0 if advantage == 2.0 else pytest.approx(0.56))


def test_a_token_without_advantage_or_logprob_has_no_colour() -> None:
    assert colour(Token(1, True, advantage=0.0), ColourBy.ADVANTAGE, 1.0) is None
    assert colour(Token(1, False), ColourBy.LOGPROB, 1.0) is None
