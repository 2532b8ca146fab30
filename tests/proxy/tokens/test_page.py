"""What a page of tokens says: the mask, log-probabilities and advantages that training had."""

from __future__ import annotations

import doctest

import pytest

from fakevllm.tokens import colours, page
from fakevllm.tokens.colours import BAD, GOOD, By, colour
from fakevllm.tokens.page import Token, of_ledger, of_server
from fakevllm_adapters.protocol.token_view import CallView, GroupView, SiblingView
from tests.proxy.tokens import pages


def test_the_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(page).failed == 0
    assert doctest.testmod(colours).failed == 0


def test_prompts_are_masked_and_answers_carry_their_siblings_advantage() -> None:
    better, worse = pages.page(0.5, -0.5).answers
    (turn,) = better.turns
    assert list(turn.prompt) == [Token(1, False), Token(2, False)]
    assert list(turn.answer) == [Token(3, True, -0.5, 0.5), Token(4, True, 0.0, 0.5)]
    assert [token.advantage for token in worse.turns[0].answer] == [-0.5, -0.5]


def test_what_was_not_trained_is_masked_and_has_no_advantage() -> None:
    (answer,) = pages.page(None).answers
    assert [token.is_trained for token in answer.turns[0].answer] == [False, False]
    (answer,) = pages.page(0.5, untrainable="missing_logprob").answers
    assert [token.advantage for token in answer.turns[0].answer] == [None, None]
    assert "not trained: missing_logprob" in answer.turns[0].notes


def test_a_token_without_a_choice_is_not_in_the_loss() -> None:
    (answer,) = pages.page(0.5, shaped=True).answers
    assert [token.is_trained for token in answer.turns[0].answer] == [True, False]


def test_a_call_without_logprobs_has_tokens_all_the_same() -> None:
    (answer,) = pages.page(0.5, logprobs=None).answers
    assert [token.logprob for token in answer.turns[0].answer] == [None, None]


def test_one_sibling_may_be_asked_for() -> None:
    record = pages.trained_group(0.5, -0.5)
    assert [one.name for one in of_ledger(record, {}, 1).answers] == ["sibling 1"]
    assert of_ledger(record, {}, 7).answers == []


def test_the_outcome_is_told_with_step_and_version() -> None:
    assert pages.page(0.5).facts == ["trained", "step 5", "made version 6"]


def test_an_episode_of_the_server_says_itself_what_was_forced() -> None:
    shown = CallView(**pages.call().model_dump(), forced=[0])
    sibling = SiblingView(
        index=0, name="abc", reward=1.0, advantage=0.5, is_trained=True, calls=[shown]
    )
    found = of_server(GroupView(group_id="task:t#abc", state="consumed", siblings=[sibling]))
    (answer,) = found.answers
    assert answer.name == "episode abc"
    assert [token.is_trained for token in answer.turns[0].answer] == [False, True]


@pytest.mark.parametrize(("advantage", "expected"), [(2.0, GOOD), (-1.0, BAD)])
def test_the_sign_of_an_advantage_is_its_colour_and_its_size_the_strength(
    advantage: float, expected: tuple[int, int, int]
) -> None:
    found = colour(Token(1, True, advantage=advantage), By.ADVANTAGE, 2.0)
    assert found is not None
    assert found[0] == expected
    assert found[1] == (1.0 if advantage == 2.0 else pytest.approx(0.56))


def test_what_has_nothing_to_tell_has_no_colour() -> None:
    assert colour(Token(1, True, advantage=0.0), By.ADVANTAGE, 1.0) is None
    assert colour(Token(1, False), By.LOGPROB, 1.0) is None
