"""Complete choices as parts of a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.http.answer_parts import AnswerPart
from fakevllm_adapters.http.complete_choices import SentChoice

TOKENS = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=5),
        "logprobs": st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    }
)


@given(st.integers(0, 255), TOKENS, st.binary(max_size=40))
def test_a_choice_that_is_sent_as_a_part_is_read_unchanged(
    index: int, tokens: dict[str, object], answer: bytes
) -> None:
    choice = SentChoice(index, tokens, answer)
    assert SentChoice.from_part(choice.to_part()) == choice


@pytest.mark.parametrize("tokens", [b"", b"[]", b"{"])
def test_a_part_without_an_object_of_tokens_is_refused(tokens: bytes) -> None:
    headers = [(b"x-fakevllm-tokens-length", b"%d" % len(tokens))]
    with pytest.raises(ValueError):
        SentChoice.from_part(AnswerPart(0, headers, tokens + b"{}"))


def test_a_part_without_the_length_of_its_tokens_is_refused() -> None:
    with pytest.raises(ValueError):
        SentChoice.from_part(AnswerPart(0, [], b"{}"))
