from typing import Any

import pytest

from fakevllm.policy import why_only_served

ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def test_an_ordinary_request_is_fanned_out() -> None:
    assert why_only_served(ASKED, 4) is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "invalid_request"),
        ({"messages": []}, "invalid_request"),
        ({"messages": "hi"}, "invalid_request"),
        (ASKED | {"temperature": 0}, "greedy_request"),
        (ASKED | {"n": 2}, "several_choices_asked"),
        (ASKED | {"use_beam_search": True}, "not_a_sample"),
        (ASKED | {"max_tokens": 1}, "at_most_one_token"),
    ],
)
def test_what_cannot_be_compared_is_only_served_and_says_why(
    body: dict[str, Any], reason: str
) -> None:
    assert why_only_served(body, 4) == reason


def test_one_sibling_has_nobody_to_be_compared_with() -> None:
    assert why_only_served(ASKED, 1) == "one_sibling"
