from collections.abc import Sequence
from dataclasses import replace

import pytest

from fakevllm_server.algorithms.mismatched_pairs import mismatched_pairs
from fakevllm_server.algorithms.sibling_demonstrations import sibling_demonstrations
from fakevllm_server.types.backend import Call
from fakevllm_server.types.demonstrations import Demonstration


def sampled(response: Sequence[int] = (3, 4)) -> Call:
    return Call("g", [1, 2], response, [-0.5] * len(response), 0, 0.7, 0.0, weight=1.0)


def kinds(scores: Sequence[float], loss: str) -> dict[int, str]:
    calls = {index: [sampled()] for index in range(len(scores))}
    found = sibling_demonstrations("g", calls, dict(enumerate(scores)), loss)
    return {index: row.kind for index, own in found.items() for row in own}


def test_sft_imitates_the_best_answer_and_dpo_compares_it_with_the_worst() -> None:
    scores = [0.5, 1.0, -1.0, -0.5]
    assert kinds(scores, "sft") == {1: "plain"}
    assert kinds(scores, "dpo") == {1: "chosen", 2: "rejected"}


def test_of_equally_good_answers_the_first_one_is_taken() -> None:
    assert kinds([-1.0, 0.5, 0.5, -1.0], "sft") == {1: "plain"}
    assert kinds([-1.0, 0.5, 0.5, -1.0], "dpo") == {1: "chosen", 0: "rejected"}


def test_kto_takes_each_answer_by_the_sign_of_its_score() -> None:
    assert kinds([0.5, 1e-10, -1.0], "kto") == {0: "desirable", 2: "undesirable"}


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto"])
def test_a_group_with_equal_rewards_gives_no_demonstration(loss: str) -> None:
    assert kinds([0.0, 0.0, 0.0], loss) == {}
    assert sibling_demonstrations("g", {}, {}, loss) == {}


def test_a_disliked_answer_alone_gives_no_pair_and_is_not_imitated() -> None:
    assert kinds([-1.0], "sft") == {}
    assert kinds([-1.0], "dpo") == {}
    assert kinds([-1.0], "kto") == {0: "undesirable"}


def test_each_call_of_an_episode_becomes_a_demonstration_of_the_same_pair() -> None:
    calls = {0: [sampled(), sampled([5])], 1: [sampled(), sampled([])], 2: [sampled([])]}
    found = sibling_demonstrations("g", calls, {0: 1.0, 1: -1.0, 2: -2.0}, "dpo")
    assert found == {
        0: [
            Demonstration("g", [1, 2], (3, 4), "chosen", "g"),
            Demonstration("g", [1, 2], [5], "chosen", "g"),
        ],
        1: [Demonstration("g", [1, 2], (3, 4), "rejected", "g")],
    }


def test_siblings_are_paired_with_responses_to_other_prompts_and_each_response_is_used_once() -> (
    None
):
    rows = [
        Demonstration(f"g{prompt}", [prompt], [10 * prompt + sibling], "desirable")
        for sibling in range(3)
        for prompt in (7, 8, 9)
    ]
    pairs = mismatched_pairs(rows)
    assert len(pairs) == len({row.response_ids[0] for row in pairs}) == 9
    assert all(row.response_ids[0] // 10 != row.prompt_ids[0] for row in pairs)


def test_rows_of_a_group_with_more_than_half_of_the_rows_have_partly_no_partner() -> None:
    rows = [Demonstration("g", [7], [at], "desirable") for at in range(3)]
    rows.append(replace(rows[0], group_id="h", prompt_ids=[8], response_ids=[9]))
    assert [(*row.prompt_ids, *row.response_ids) for row in mismatched_pairs(rows)] == [
        (7, 9),
        (8, 0),
    ]


def test_a_prompt_is_not_paired_with_a_response_of_its_own_group_even_if_the_prompts_differ() -> (
    None
):
    """The calls of an episode have different prompts."""
    turns = [Demonstration("g", [7, at], [at], "desirable") for at in range(4)]
    assert mismatched_pairs(turns) == []
    other = Demonstration("h", [8, 8], [9], "undesirable")
    assert [row.response_ids for row in mismatched_pairs([*turns, other])] == [[9], [0]]


def test_a_mismatched_pair_is_never_longer_than_the_longest_row() -> None:
    long = [
        Demonstration("a", [7] * 200, [9, 8], "desirable"),
        Demonstration("b", [7], [5] * 200, "undesirable"),
    ]
    pairs = [(len(row.prompt_ids), len(row.response_ids)) for row in mismatched_pairs(long)]
    assert pairs == [(1, 2)]
