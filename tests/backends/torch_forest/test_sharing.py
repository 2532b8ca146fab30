from __future__ import annotations

from forest.call_sets import call_sets
from hypothesis import given

from fakevllm_server.backends.torch_forest.sharing import SHARE_OF_A_TOKEN, worth_sharing
from fakevllm_server.forest import CallTokens, plant


def test_a_token_that_begins_every_prompt_is_not_shared() -> None:
    prompts = [[0, first, *[5] * 20] for first in range(1, 9)]
    siblings = [CallTokens.of(prompt, [last]) for prompt in prompts for last in (1, 2, 3)]
    forest = plant(worth_sharing(siblings))
    assert [forest.ids[top.start] for top in forest.segments if top.parent < 0] == [0] * 8
    assert forest.num_nodes == 8 * (22 + 3), "what is behind it still is"


def test_a_long_prompt_stays_shared() -> None:
    calls = [CallTokens.of([0] * 100, [last] * 50) for last in range(8)]
    assert worth_sharing(calls) == calls


@given(calls=call_sets(max_calls=8))
def test_calls_stay_what_they_are_and_roots_that_differed_still_do(
    calls: list[CallTokens],
) -> None:
    kept = worth_sharing(calls)
    for one, other in zip(calls, kept, strict=True):
        assert (one.ids, one.trained) == (other.ids, other.trained)
        assert one.temperature == other.temperature
    roots = {other.root: one.root for one, other in zip(calls, kept, strict=True)}
    assert all(roots[other.root] == one.root for one, other in zip(calls, kept, strict=True))
    for top in plant(kept).segments:
        if top.parent < 0 and top.children:
            saved = (top.end - top.start) * (len(top.children) - 1)
            assert saved >= SHARE_OF_A_TOKEN * (top.tout - top.end)
