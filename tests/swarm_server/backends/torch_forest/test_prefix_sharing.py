from __future__ import annotations

from hypothesis import given
from swarm_server.forest.call_sets import call_sets

from fakevllm_server.backends.torch_forest.prefix_sharing import (
    SHARE_OF_A_TOKEN,
    unshare_small_prefixes,
)
from fakevllm_server.forest import CallTokens, build_forest


def test_a_token_that_begins_every_prompt_is_not_shared() -> None:
    prompts = [[0, first, *[5] * 20] for first in range(1, 9)]
    siblings = [CallTokens.of(prompt, [last]) for prompt in prompts for last in (1, 2, 3)]
    forest = build_forest(unshare_small_prefixes(siblings))
    assert [forest.ids[top.start] for top in forest.segments if top.parent < 0] == [0] * 8
    assert forest.num_nodes == 8 * (22 + 3), "the longer prompts are still shared"


def test_a_long_prompt_stays_shared() -> None:
    calls = [CallTokens.of([0] * 100, [last] * 50) for last in range(8)]
    assert unshare_small_prefixes(calls) == calls


def test_a_session_with_stripped_reasoning_stays_shared() -> None:
    """Each answer begins with reasoning that later prompts do not contain, so each answer is a
    branch."""
    trunk, calls = [1] * 100, list[CallTokens]()
    for turn in range(30):
        thought, answer = [2 + turn] * 60, [3 + turn] * 30
        calls.append(CallTokens.of(trunk, [*thought, *answer]))
        trunk = [*trunk, *answer, *[4 + turn] * 30]
    assert unshare_small_prefixes(calls) == calls


@given(calls=call_sets(max_calls=8))
def test_calls_stay_the_same_and_different_roots_stay_different(
    calls: list[CallTokens],
) -> None:
    kept = unshare_small_prefixes(calls)
    for before, after in zip(calls, kept, strict=True):
        assert (before.ids, before.trained) == (after.ids, after.trained)
        assert before.temperature == after.temperature
    roots = {after.root: before.root for before, after in zip(calls, kept, strict=True)}
    assert all(roots[after.root] == before.root for before, after in zip(calls, kept, strict=True))
    forest = build_forest(kept)
    for top in forest.segments:
        if top.parent < 0 and top.children:
            saved = (top.end - top.start) * (len(top.children) - 1)
            lighter = forest.segments[top.children[1]].start
            assert saved >= SHARE_OF_A_TOKEN * (top.tout - lighter)
