from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.decode.scheduler import Scheduler, SchedulerOutput
from fakevllm_server.types.sampling import Sampling


def decode_request(*ids: int) -> DecodeRequest:
    return DecodeRequest(list(ids), 8, Sampling(), random.Random(0), stream=None)


def plan(scheduler: Scheduler, num_rows: int = 0, cached: Sequence[int] = ()) -> SchedulerOutput:
    """Plan with a cache that holds the ids `cached`."""
    return scheduler.schedule(num_rows, lambda ids: common(ids, cached), lambda rows, length: True)


def common(ids: Sequence[int], cached: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    pairs = zip(ids, cached, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(cached)))


def add(scheduler: Scheduler, *requests: DecodeRequest) -> list[DecodeRequest]:
    for one in requests:
        scheduler.add(one)
    return list(requests)


def test_siblings_share_one_prefill() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    siblings = add(scheduler, *(decode_request(1, 2, 3) for _ in range(4)))

    output = plan(scheduler)

    assert list(output.prefill.values()) == [[1, 2]]
    assert scheduler.prefilled() == {siblings[0].prefix_key: siblings}


def test_a_request_equal_to_one_in_prefill_waits_for_it() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    first = add(scheduler, decode_request(1, 2, 3))[0]
    plan(scheduler)
    late = add(scheduler, decode_request(1, 2, 3))[0]

    assert plan(scheduler).prefill == {}
    assert scheduler.prefilled()[first.prefix_key] == [first, late]


def test_a_known_prefix_and_a_prompt_of_one_token_join_at_once() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    known, single = add(scheduler, decode_request(1, 2, 3), decode_request(9))

    output = plan(scheduler, cached=known.prefix)

    assert output.joining == [known, single]
    assert output.prefill == {}


def test_the_row_limit_counts_requests_in_prefill() -> None:
    scheduler = Scheduler(max_rows=4, max_prefill_tokens=100)
    add(scheduler, *(decode_request(i, 2, 3) for i in range(6)))

    assert len(plan(scheduler, num_rows=2).prefill) == 2
    assert plan(scheduler, num_rows=2).prefill == {}
    assert len(scheduler.waiting) == 4


def test_a_prefill_has_a_bounded_number_of_padded_tokens_but_takes_at_least_one_prompt() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=10)
    add(scheduler, decode_request(*range(6)), decode_request(*range(7)), decode_request(*range(50)))

    assert [len(ids) for ids in plan(scheduler).prefill.values()] == [5]
    scheduler.prefilled()
    assert [len(ids) for ids in plan(scheduler).prefill.values()] == [6]
    scheduler.prefilled()
    assert [len(ids) for ids in plan(scheduler).prefill.values()] == [49]


def test_only_prompts_with_equally_many_cached_tokens_are_prefilled_together() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    add(scheduler, *(decode_request(*ids, 0) for ids in ([1, 2, 3], [1, 2, 4, 4], [5, 5], [1, 2])))

    output = plan(scheduler, cached=[1, 2])

    assert list(output.prefill.values()) == [[1, 2, 3], [1, 2, 4, 4]]
    assert output.num_cached == 2
    assert len(scheduler.waiting) == 2, "a later request does not overtake [5, 5]"


def test_cached_tokens_do_not_count_against_the_size_of_a_prefill() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=4)
    system = list(range(50))
    add(scheduler, *(decode_request(*system, 90 + i, 0) for i in range(6)))

    assert len(plan(scheduler, cached=system).prefill) == 4


def test_cancelled_requests_are_skipped() -> None:
    scheduler = Scheduler(max_rows=1, max_prefill_tokens=10)
    gone, staying = add(scheduler, decode_request(1), decode_request(2))
    gone.cancelled = True

    assert plan(scheduler).joining == [staying]


def test_the_first_waiting_request_is_not_overtaken_if_memory_is_short() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    add(scheduler, decode_request(1, 2, 3, 4), decode_request(5))

    output = scheduler.schedule(1, lambda ids: 0, lambda rows, length: length < 5)

    assert output == SchedulerOutput() and len(scheduler.waiting) == 2


def test_preempted_requests_are_first_in_their_old_order() -> None:
    scheduler = Scheduler(max_rows=8, max_prefill_tokens=100)
    waiting = add(scheduler, decode_request(9))
    back = [decode_request(1), decode_request(2)]

    scheduler.put_back(back)

    assert plan(scheduler).joining == [*back, *waiting]


@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30))
def test_every_request_is_decoded_exactly_once_after_its_prefix_is_computed(
    prompts: list[list[int]],
) -> None:
    scheduler = Scheduler(max_rows=5, max_prefill_tokens=8)
    requests = add(scheduler, *(decode_request(*prompt) for prompt in prompts))
    known: set[bytes] = set()

    def num_cached(ids: list[int]) -> int:
        return len(ids) if array("i", ids).tobytes() in known else 0

    joined: list[DecodeRequest] = []
    running = 0
    for _ in range(100):
        output = scheduler.schedule(
            running,
            num_cached,
            lambda rows, length: True,
        )
        assert running + len(output.joining) + scheduler.num_prefilling <= 5
        assert all(not one.prefix or one.prefix_key in known for one in output.joining)
        assert not output.prefill.keys() & known, "nothing is computed twice"
        prefilled = scheduler.prefilled()
        known.update(prefilled)
        joined += output.joining + [one for row in prefilled.values() for one in row]
        running = 0
    assert sorted(map(id, joined)) == sorted(map(id, requests))
