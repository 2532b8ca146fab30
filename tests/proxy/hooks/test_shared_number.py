"""A number in memory that two processes share."""

from __future__ import annotations

import multiprocessing
import sys

from fakevllm.hooks.shared_number import SharedNumber

LARGEST = 2**64 - 1


def write(number: SharedNumber, expected: int) -> None:
    """Write into the memory, in another process."""
    if number.value != expected:
        sys.exit(1)
    number.value = LARGEST


def test_two_processes_see_the_same_number() -> None:
    number = SharedNumber.zero()
    number.value = 7
    process = multiprocessing.get_context("spawn").Process(target=write, args=(number, 7))
    with number.file:
        process.start()
    process.join(60)
    assert (process.exitcode, number.value) == (0, LARGEST)
