from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    decode_request,
    load,
    plain_logprobs,
    run_dry,
    sampling_state,
)
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode import decoder
from fakevllm_server.backends.embedded.decode.decoder import MIN_SHARED_TOKENS, Prefill
from fakevllm_server.backends.embedded.decode.prefix_cache import PrefixCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.decode.sampling_state import SamplingState
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.sampling import Sampling


@pytest.fixture
def model(tiny_folder: Path) -> PreTrainedModel:
    return load(tiny_folder)


def random_requests(count: int, seed: int = 0) -> list[DecodeRequest]:
    rng = random.Random(seed)
    return [
        decode_request(
            [rng.randrange(7, 512) for _ in range(rng.choice([1, 2, 5, 30, 70]))],
            rng.randrange(1, 40),
            Sampling(temperature=rng.choice([0.5, 1.0, 1.5]), ignore_eos=True),
            seed=index,
        )
        for index in range(count)
    ]


def check_logprobs(model: PreTrainedModel, done: DecodeRequest) -> None:
    """Compare the reported log-probabilities with the model's own, without cache, batch or
    padding."""
    plain = plain_logprobs(model, done.ids, done.sampling.temperature)
    start = len(done.ids) - done.num_sampled
    for at, token in enumerate(done.undelivered, start=start):
        assert token.id == done.ids[at]
        assert token.logprob == pytest.approx(plain[at - 1, token.id].item(), abs=2e-4)


def finish_joining_over_time(state: SamplingState, requests: list[DecodeRequest]) -> None:
    with torch.inference_mode():
        for one in requests:
            state.scheduler.add(one)
            state.run_iteration()
            state.run_iteration()
    run_dry(state)


def test_logprobs_equal_the_models_own_whatever_else_is_in_the_batch(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model, max_rows=6)
    requests = random_requests(30)

    finish_joining_over_time(state, requests)

    for one in requests:
        assert one.finished and one.num_sampled == one.limit
        check_logprobs(model, one)


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch(
    model: PreTrainedModel,
) -> None:
    crowd = sampling_state(model, max_rows=6)
    together = random_requests(20)
    finish_joining_over_time(crowd, together)

    for one, alone in zip(together, random_requests(20), strict=True):
        state = sampling_state(model)
        state.scheduler.add(alone)
        run_dry(state)
        assert alone.ids == one.ids


def test_a_long_prompt_is_prefilled_in_pieces_while_other_requests_decode(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fakevllm_server.backends.embedded.decode.sampling_state.MAX_PREFILL_TOKENS", 16
    )
    state = sampling_state(model)
    short, long = (
        decode_request([9], 12, Sampling(ignore_eos=True)),
        decode_request(range(7, 107), 3, Sampling()),
    )
    with torch.inference_mode():
        for one in (short, long):
            state.scheduler.add(one)
        state.run_iteration()
        state.run_iteration()

    assert short.num_sampled == 2 and long.num_sampled == 0, "99 tokens take seven pieces of 16"
    run_dry(state)
    check_logprobs(model, long)


def test_requests_wait_if_memory_is_short_and_give_the_same_tokens(
    model: PreTrainedModel,
) -> None:
    rows = [decode_request([10 + i], 150, Sampling(ignore_eos=True), seed=i) for i in range(6)]
    # Eight rows of 128 positions fit, and of 256 only four.
    state = sampling_state(model, max_cells=8 * 128)
    crowds: list[int] = []
    with torch.inference_mode():
        for one in rows:
            state.scheduler.add(one)
        while state.has_work:
            state.run_iteration()
            crowds.append(len(state.decoder.rows))
            assert state.decoder.cache.keys[0, :, 0, :, 0].numel() <= 8 * 128

    assert max(crowds) == 6 and 4 in crowds, "two had to leave when the others grew"
    for one in rows:
        assert one.num_sampled == 150
        check_logprobs(model, one)


def test_the_end_of_sequence_ends_a_request_unless_it_is_ignored(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    # Every token counts as an end here.
    state.decoder._eos_ids = frozenset(range(512))  # pyright: ignore[reportPrivateUsage]
    ending, ignoring = (
        decode_request([9], 5, Sampling()),
        decode_request([9], 5, Sampling(ignore_eos=True)),
    )
    for one in (ending, ignoring):
        state.scheduler.add(one)

    run_dry(state)

    assert ending.num_sampled == 1 and len(ending.undelivered) == 1
    assert ignoring.num_sampled == 5


def test_a_cancelled_row_is_free_in_the_next_iteration(model: PreTrainedModel) -> None:
    state = sampling_state(model, max_rows=1)
    first, second = (
        decode_request([9], 100, Sampling(ignore_eos=True)),
        decode_request([10], 3, Sampling(ignore_eos=True)),
    )
    for one in (first, second):
        state.scheduler.add(one)
    with torch.inference_mode():
        state.run_iteration()
        first.cancelled = True
        state.run_iteration()

    assert state.decoder.rows == [second] and first.num_sampled == 1


def test_siblings_prefill_once_even_if_some_arrive_later(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Counted(Prefill):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(len(self.result()))

    monkeypatch.setattr(decoder, "Prefill", Counted)
    state = sampling_state(model)
    siblings = [
        decode_request(range(7, 40), 4, Sampling(ignore_eos=True), seed=i) for i in range(6)
    ]
    with torch.inference_mode():
        for one in siblings[:3]:
            state.scheduler.add(one)
        state.run_iteration()
        for one in siblings[3:]:
            state.scheduler.add(one)
    run_dry(state)

    assert started == [1]
    for one in siblings:
        check_logprobs(model, one)


def test_a_prompts_first_token_comes_from_its_prefill_and_is_delivered_at_once(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    short, long = (
        decode_request(range(7, 107), limit, Sampling(ignore_eos=True)) for limit in (1, 3)
    )
    with torch.inference_mode():
        state.scheduler.add(short)
        assert state.run_iteration() == [short]
        assert short.finished and not state.has_work
        state.scheduler.add(long)
        long.ids[0] = 5  # another prompt, which is not cached
        assert state.run_iteration() == [long]
        assert long.num_sampled == 1
        assert state.run_iteration() == [long]
        assert long.num_sampled == 2
    run_dry(state)
    for one in (short, long):
        check_logprobs(model, one)


def test_a_first_token_from_a_prefill_does_not_delay_the_rows_that_run(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    running = decode_request([9], 12, Sampling(ignore_eos=True))
    ended, going_on = (decode_request(range(7, 50 + n), n, Sampling()) for n in (1, 4))
    with torch.inference_mode():
        state.scheduler.add(running)
        state.run_iteration()
        for num_sampled, one in ((2, ended), (3, going_on)):
            state.scheduler.add(one)
            assert set(state.run_iteration()) == {running, one}
            assert running.num_sampled == num_sampled
    assert (ended.num_sampled, going_on.num_sampled) == (1, 2)


def test_waiting_siblings_get_their_first_tokens_from_one_prefill_and_share_the_prompt(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    prompt = [7 + at % 200 for at in range(MIN_SHARED_TOKENS + 5)]
    siblings = [decode_request(prompt, 4, Sampling(ignore_eos=True), seed=i) for i in range(3)]
    siblings[0].limit = 1
    for one in siblings:
        state.scheduler.add(one)
    with torch.inference_mode():
        assert state.run_iteration() == siblings
    assert [one.num_sampled for one in siblings] == [1, 1, 1]
    (shared,) = state.decoder.cache.shared_rows
    assert shared.num_rows == 2, "the first sibling has ended"
    run_dry(state)
    for one in siblings:
        check_logprobs(model, one)


def test_prompts_that_differ_only_in_their_last_token_begin_with_their_own_tokens(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    prompts = [[*range(7, 40), last] for last in (50, 51, 50, 52)]
    requests = [decode_request(ids, 3, Sampling(ignore_eos=True)) for ids in prompts]
    for one in requests:
        state.scheduler.add(one)
    run_dry(state)
    for one in requests:
        check_logprobs(model, one)
    assert requests[0].ids == requests[2].ids, "both have the same seed"


def test_if_only_whole_prompts_are_reused_a_cached_prompt_gives_bit_equal_first_tokens(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    state.prefixes = PrefixCache(1000, whole_prompts=True)
    first, again = (decode_request(range(7, 107), 2, Sampling(), seed=1) for _ in range(2))
    for one in (first, again):
        state.scheduler.add(one)
        run_dry(state)
    assert state.prefixes.num_reused_tokens == 99
    assert state.prefixes.num_queried_tokens == 2 * 99
    assert [token.logprob for token in first.undelivered] == [
        token.logprob for token in again.undelivered
    ]


def test_turns_of_a_session_compute_only_what_is_new(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    history = list(range(7, 107))
    reused: list[int] = []
    for turn in range(3):
        one = decode_request(history, 4, Sampling(ignore_eos=True), seed=turn)
        state.scheduler.add(one)
        run_dry(state)
        check_logprobs(model, one)
        reused.append(state.prefixes.num_reused_tokens)
        history = [*one.ids, *range(200 + turn, 230 + turn)]

    assert reused == [0, 96, 96 + 128], "whole steps of the prompt before and its answer"


def test_the_next_turn_reuses_the_sampled_tokens_too(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    first = decode_request(range(7, 40), 100, Sampling(ignore_eos=True))
    state.scheduler.add(first)
    run_dry(state)
    second = decode_request([*first.ids, 50, 51, 52], 4, Sampling(ignore_eos=True))
    state.scheduler.add(second)
    run_dry(state)

    assert state.prefixes.num_reused_tokens == 128, "33 tokens of the prompt, 99 of the answer"
    check_logprobs(model, second)


def test_a_cancelled_answer_is_reused_as_far_as_it_got(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    first = decode_request(range(7, 40), 100, Sampling(ignore_eos=True))
    state.scheduler.add(first)
    with torch.inference_mode():
        for _ in range(40):
            state.run_iteration()
    first.cancelled = True
    run_dry(state)
    second = decode_request([*first.ids, 50, 51, 52], 4, Sampling(ignore_eos=True))
    state.scheduler.add(second)
    run_dry(state)

    assert first.num_sampled == 40
    assert state.prefixes.num_reused_tokens == 64, "whole steps of 33 + 39 tokens"
    check_logprobs(model, second)


def test_answers_are_not_kept_above_the_bound_of_the_prefix_cache(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    state.prefixes = PrefixCache(max_tokens=40)
    first = decode_request(range(7, 40), 30, Sampling(ignore_eos=True))
    state.scheduler.add(first)
    run_dry(state)

    assert state.prefixes.num_tokens == 32, "the prompt alone"
    assert state.prefixes.num_cached(first.ids) == 32


def test_new_weights_drop_the_answers_of_old_weights(
    model: PreTrainedModel, tiny_folder: Path
) -> None:
    state = sampling_state(model)
    new = perturbed(tiny_folder)
    first = decode_request(range(7, 40), 100, Sampling(ignore_eos=True))
    state.scheduler.add(first)
    with torch.inference_mode():
        for _ in range(70):
            state.run_iteration()
    publish(state, new, version=1, bound_s=0)
    assert state.prefixes.num_tokens == 0
    run_dry(state)
    second = decode_request([*first.ids, 50, 51, 52], 4, Sampling(ignore_eos=True))
    state.scheduler.add(second)
    run_dry(state)

    assert state.prefixes.num_reused_tokens == 128
    check_logprobs(new, second)


def test_siblings_read_a_long_prompt_where_it_lies(model: PreTrainedModel) -> None:
    """They end and join at different times, beside rows that share nothing or something else."""
    state = sampling_state(model, max_rows=16, max_length=512)
    prompts = [range(7, 7 + MIN_SHARED_TOKENS + 20), range(9, 9 + MIN_SHARED_TOKENS + 50)]
    rows = [
        decode_request(prompts[index % 2], 5 + index, Sampling(ignore_eos=True), seed=index)
        for index in range(10)
    ]
    alone = random_requests(4)
    with torch.inference_mode():
        for one in [*rows[:6], *alone]:
            state.scheduler.add(one)
        while not rows[0].num_sampled:
            state.run_iteration()
        assert [one.num_rows for one in state.decoder.cache.shared_rows] == [3, 3]
        for one in rows[6:]:
            state.scheduler.add(one)
        state.run_iteration()
        assert [one.num_rows for one in state.decoder.cache.shared_rows] == [5, 5]
    run_dry(state)

    for one in [*rows, *alone]:
        check_logprobs(model, one)
    follower = decode_request([*rows[9].ids, 50], 3, Sampling(ignore_eos=True))
    state.scheduler.add(follower)
    run_dry(state)
    check_logprobs(model, follower)
    assert state.prefixes.num_reused_tokens > len(rows[9].ids) - 32


def test_a_row_alone_shares_nothing(model: PreTrainedModel) -> None:
    state = sampling_state(model, max_length=512)
    one = decode_request(range(7, 200), 3, Sampling(ignore_eos=True))
    state.scheduler.add(one)
    with torch.inference_mode():
        while not one.num_sampled:
            state.run_iteration()

    assert state.decoder.cache.shared_rows == []


def test_prompts_that_share_a_cached_beginning_are_prefilled_together(
    model: PreTrainedModel,
) -> None:
    state = sampling_state(model)
    system = list(range(7, 80))
    rows = [
        decode_request([*system, *range(100 + i, 103 + 2 * i)], 5, Sampling(ignore_eos=True), i)
        for i in range(6)
    ]
    state.scheduler.add(rows[0])
    run_dry(state)
    for one in rows[1:]:
        state.scheduler.add(one)
    run_dry(state)

    for one in rows:
        check_logprobs(model, one)
    assert state.prefixes.num_reused_tokens == 5 * 64


def test_without_a_prefix_cache_siblings_still_share_a_prefill(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    state.prefixes = PrefixCache(max_tokens=0)
    siblings = [decode_request(range(7, 40), 4, Sampling(ignore_eos=True), i) for i in range(4)]
    for one in siblings:
        state.scheduler.add(one)
    run_dry(state)

    assert state.prefixes.num_tokens == 0 and state.prefixes.num_reused_tokens == 0
    for one in siblings:
        check_logprobs(model, one)


def test_a_prompt_above_the_bound_of_the_prefix_cache_is_served(model: PreTrainedModel) -> None:
    state = sampling_state(model)
    state.prefixes = PrefixCache(max_tokens=20)
    one = decode_request(range(7, 107), 4, Sampling(ignore_eos=True))
    state.scheduler.add(one)
    run_dry(state)

    check_logprobs(model, one)
    assert state.prefixes.num_tokens == 0


def publish(state: SamplingState, source: PreTrainedModel, version: int, bound_s: float) -> int:
    """Publish, and return how many iterations the publish waited."""
    turns = 0
    for _ in state.publish(lambda: source, version, bound_s):
        turns += 1
        with torch.inference_mode():
            state.run_iteration()
    return turns


def perturbed(folder: Path) -> PreTrainedModel:
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def test_a_publish_lets_running_requests_finish_while_others_wait(
    model: PreTrainedModel, tiny_folder: Path
) -> None:
    state = sampling_state(model)
    new = perturbed(tiny_folder)
    running, waiting = (
        decode_request([9, 10], 6, Sampling(ignore_eos=True)),
        decode_request([9, 11], 4, Sampling(ignore_eos=True)),
    )
    state.scheduler.add(running)
    with torch.inference_mode():
        state.run_iteration()
    state.scheduler.add(waiting)

    turns = publish(state, new, version=1, bound_s=60)
    run_dry(state)

    assert turns == 5, "what was left of the running request"
    assert {token.version for token in running.undelivered} == {0}
    assert {token.version for token in waiting.undelivered} == {1}
    check_logprobs(new, waiting)


def test_a_request_running_past_the_drain_bound_continues_with_the_new_weights(
    model: PreTrainedModel, tiny_folder: Path
) -> None:
    state = sampling_state(model)
    old, new = load(tiny_folder), perturbed(tiny_folder)
    running = decode_request(range(7, 27), 10, Sampling(ignore_eos=True))
    state.scheduler.add(running)
    with torch.inference_mode():
        for _ in range(4):
            state.run_iteration()

    publish(state, new, version=1, bound_s=0)
    run_dry(state)

    assert [token.version for token in running.undelivered] == [0] * 4 + [1] * 6
    for version, weights in enumerate((old, new)):
        plain = plain_logprobs(weights, running.ids)
        for at, token in enumerate(running.undelivered, start=20):
            if token.version == version:
                assert token.logprob == pytest.approx(plain[at - 1, token.id].item(), abs=2e-4)


def test_a_publish_clears_the_prefix_cache(model: PreTrainedModel, tiny_folder: Path) -> None:
    state = sampling_state(model)
    new = perturbed(tiny_folder)
    for version in range(2):
        one = decode_request(range(7, 27), 3, Sampling(ignore_eos=True))
        state.scheduler.add(one)
        run_dry(state)
        check_logprobs([load(tiny_folder), new][version], one)
        publish(state, new, version=version + 1, bound_s=1)


def test_a_publish_during_a_prefill_begins_the_prefill_again_with_the_new_weights(
    model: PreTrainedModel, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fakevllm_server.backends.embedded.decode.sampling_state.MAX_PREFILL_TOKENS", 16
    )
    state = sampling_state(model)
    new = perturbed(tiny_folder)
    long = decode_request(range(7, 107), 4, Sampling(ignore_eos=True))
    state.scheduler.add(long)
    with torch.inference_mode():
        for _ in range(3):
            state.run_iteration()
    assert long.num_sampled == 0 and state.scheduler.num_prefilling == 1, "in the middle of it"

    publish(state, new, version=1, bound_s=60)
    run_dry(state)

    assert {token.version for token in long.undelivered} == {1}
    check_logprobs(new, long)


def test_weights_of_another_architecture_are_refused_before_anything_changes(
    model: PreTrainedModel, demo_folder: Path
) -> None:
    state = sampling_state(model)
    before = next(model.parameters()).clone()

    with pytest.raises(BackendError, match="another architecture"):
        publish(state, load(demo_folder), version=1, bound_s=0)

    assert state.version == 0
    assert torch.equal(next(model.parameters()), before)
    one = decode_request([9], 2, Sampling())
    state.scheduler.add(one)
    run_dry(state)
    assert one.finished, "admission goes on"
