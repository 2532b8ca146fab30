"""Arrays of numbers are compared as the lists that they stand for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.types.number_arrays import float_array, id_array, repeated

NUMBERS = st.lists(st.integers(0, 3), max_size=3)


@pytest.mark.parametrize("kind", [id_array, float_array])
@given(one=NUMBERS, other=NUMBERS)
def test_arrays_and_lists_are_equal_or_different_as_two_lists_are(
    kind: Any, one: list[int], other: list[int]
) -> None:
    pairs: Iterable[tuple[Any, Any]] = [
        (kind(one), other),
        (one, kind(other)),
        (kind(one), tuple(other)),
        (kind(one), kind(other)),
    ]
    for left, right in pairs:
        assert (left == right) is (one == other)
        assert (left != right) is (one != other)


def test_an_array_survives_a_pickle() -> None:
    for numbers in (id_array([1, 2]), float_array([0.5]), repeated(0.25, 3)):
        copied = pickle.loads(pickle.dumps(numbers))
        assert copied == numbers and type(copied) is type(numbers)
