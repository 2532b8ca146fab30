from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.backends.embedded.engine_helpers import load

from fakevllm_server.backends.embedded.decode.thread_choice import (
    LEAST_GAIN,
    choose_threads,
    measured_threads,
)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.9}, 1),
        ({1: 1.0, 2: 0.5}, 2),
        ({1: 1.0, 2: 0.5, 4: 0.45}, 2),
        ({1: 1.0, 2: 0.95, 4: 0.3}, 4),
        ({1: 1.0, 2: 3.0, 4: 2.0}, 1),
    ],
)
def test_more_threads_are_chosen_only_for_a_clear_gain(
    seconds: dict[int, float], expected: int
) -> None:
    assert choose_threads(seconds) == expected


@given(seconds=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(0.001, 10), min_size=1))
def test_no_smaller_number_is_as_fast_up_to_the_least_gain(seconds: dict[int, float]) -> None:
    chosen = choose_threads(seconds)

    for number, time_s in seconds.items():
        if number < chosen:
            assert seconds[chosen] * LEAST_GAIN <= time_s


def test_measuring_leaves_the_number_of_threads_as_it_was(tiny_folder: Path) -> None:
    before = torch.get_num_threads()

    assert measured_threads(load(tiny_folder), max_model_len=64) >= 1

    assert torch.get_num_threads() == before
