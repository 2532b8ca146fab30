"""A reply that pages share: how long it is shown, and when it is forgotten."""

from __future__ import annotations

from itertools import count

from fakevllm.console.sources.shared_reply import MAX_AGE_S, SharedReply


def test_a_reply_is_fetched_again_when_it_is_old_or_forgotten() -> None:
    now, numbers = [0.0], count()
    shared = SharedReply(lambda: next(numbers), lambda: now[0])
    assert [shared.get(0.0), shared.get(0.0)] == [0, 0]
    now[0] += MAX_AGE_S + 1.0
    assert [shared.get(0.0), shared.get(0.0)] == [1, 1]
    shared.forget()
    assert [shared.get(0.0), shared.get(0.0)] == [2, 2]


def test_a_reply_that_is_forgotten_while_it_is_fetched_is_not_kept() -> None:
    numbers = count()

    def fetch() -> int:
        number = next(numbers)
        if number == 0:
            shared.forget()  # something was changed after the program had made its reply
        return number

    shared = SharedReply(fetch, lambda: 0.0)
    assert [shared.get(0.0), shared.get(0.0), shared.get(0.0)] == [0, 1, 1]
