"""The plan check detects and names every difference between a plan and the recorded calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_server.backends.embedded.engine_helpers import SPEC, pieces, random_calls

from fakevllm_server.backends.embedded.train.micro_batches import StepPiece, cut_into_pieces
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.plan_check import PlanCheck, check_plan
from fakevllm_server.forest import CallTokens, build_forest
from fakevllm_server.types.backend import Call
from fakevllm_server.types.token_masks import TokenMasks, packed

SIBLINGS = [
    Call("g", [1, 2, 3], [4, 5], [-0.5, -0.25], 0, 1.0, 1.0, 1.0),
    Call("g", [1, 2, 3], [4, 6, 7], [-0.5, -0.75, -1.5], 0, 1.0, -0.5, 1.0),
    Call("h", [1, 2, 3, 4, 5, 9], [8], [-2.0], 0, 0.7, -0.5, 1.0),
]
"""Two calls that share a sampled token, and a third that continues the first at another
temperature."""
NUM_TOKENS = 6


def check_piece(piece: StepPiece, calls: Sequence[Call] = SIBLINGS, **changed: Any) -> PlanCheck:
    plan = replace(piece.plan, **changed) if changed else piece.plan
    piece_calls = [calls[index] for index in piece.calls]
    return check_plan(plan, piece_calls, piece.tokens.sampled_log_prob)


def piece_of(calls: list[Call] = SIBLINGS) -> StepPiece:
    (piece,) = pieces(calls, 1000).pieces
    return piece


def in_forest(piece: StepPiece, **changed: Any) -> Plan:
    """Return the plan with a changed forest and the same tensors."""
    return replace(piece.plan, forest=replace(piece.plan.forest, **changed))


def in_edges(piece: StepPiece, **changed: Any) -> Plan:
    forest = piece.plan.forest
    return in_forest(piece, edges=replace(forest.edges, **changed))


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), max_tokens=st.sampled_from([1, 60, 10_000]))
def test_every_token_of_a_correct_plan_passes(seed: int, max_tokens: int) -> None:
    calls = random_calls(12, seed)
    turns = [
        Call("g", [*call.prompt_ids, *call.response_ids, 9], [7, 8], [-1.0, -2.0], 0, 1.0, 1.0, 1.0)
        for call in calls[:6]
    ]
    calls = [*calls, *calls[:3], *turns]
    results = [check_piece(piece, calls) for piece in pieces(calls, max_tokens).pieces]

    assert [result.fault for result in results] == [None] * len(results)
    num_correct = sum(result.num_correct for result in results)
    assert num_correct == sum(len(call.response_ids) for call in calls)


def swapped(numbers: torch.Tensor, first: int, second: int) -> torch.Tensor:
    copy = numbers.clone()
    copy[[first, second]] = copy[[second, first]]
    return copy


def moved(numbers: torch.Tensor, at: int) -> torch.Tensor:
    copy = numbers.clone()
    copy[at] += 1
    return copy


def with_tout(piece: StepPiece, node: int, end: int) -> Plan:
    tout = array("q", piece.plan.forest.tout)
    tout[node] = end
    return in_forest(piece, tout=tout)


def with_parent(piece: StepPiece, node: int, parent: int) -> Plan:
    parents = array("q", piece.plan.forest.parent)
    parents[node] = parent
    return in_forest(piece, parent=parents)


def with_segment(piece: StepPiece, number: int, **changed: Any) -> list[Any]:
    segments: list[Any] = list(piece.plan.forest.segments)
    segments[number] = replace(segments[number], **changed)
    return segments


FIRST, SECOND, THIRD = "call 0 (group g)", "call 1 (group g)", "call 2 (group h)"
PLANS: dict[str, tuple[Callable[[StepPiece], Plan], int, str]] = {
    "two tokens of a call gather each other's edge": (
        lambda piece: replace(piece.plan, gather=swapped(piece.plan.gather, 0, 1)),
        2,
        f"{FIRST}, response token 0",
    ),
    "a gather points to no edge": (
        lambda piece: replace(piece.plan, gather=piece.plan.gather.clamp(max=99).add(99)),
        6,
        f"{FIRST}, response token 0",
    ),
    "the id before the last token is another": (
        lambda piece: replace(piece.plan, ids=moved(piece.plan.ids, 5)),
        1,
        f"{THIRD}, response token 0",
    ),
    "the first id of the forest is another": (
        lambda piece: replace(piece.plan, ids=moved(piece.plan.ids, 0)),
        6,
        f"{FIRST}, response token 0",
    ),
    "a position is another": (
        lambda piece: replace(piece.plan, pos=moved(piece.plan.pos, 7)),
        1,
        f"{SECOND}, response token 2",
    ),
    "an edge has another id": (
        lambda piece: replace(piece.plan, edge_token=moved(piece.plan.edge_token, 0)),
        1,
        f"{THIRD}, response token 0",
    ),
    "a head is one node too late": (
        lambda piece: replace(piece.plan, head_node=moved(piece.plan.head_node, 0)),
        1,
        f"{THIRD}, response token 0",
    ),
    "logits are divided by another temperature": (
        lambda piece: replace(piece.plan, head_temperature=piece.plan.head_temperature.sqrt()),
        1,
        f"{THIRD}, response token 0",
    ),
    "logits are masked to a set that was not recorded": (
        lambda piece: in_edges(
            piece, head_set=array("q", [0, *piece.plan.forest.edges.head_set[1:]])
        ),
        1,
        f"{THIRD}, response token 0",
    ),
    "a node is not visible to all of its descendants": (
        lambda piece: with_tout(piece, 0, 4),
        6,
        f"{FIRST}, response token 0",
    ),
    "a node is visible to a sibling branch": (
        lambda piece: with_tout(piece, 6, 9),
        1,
        f"{SECOND}, response token 2",
    ),
    "a node has another parent": (
        lambda piece: with_parent(piece, 7, 4),
        1,
        f"{SECOND}, response token 2",
    ),
    "a subtree ends before its last node": (
        lambda piece: in_forest(
            piece,
            tout=array("q", [8, 8, 8, 8, *piece.plan.forest.tout[4:]]),
            segments=with_segment(piece, 0, tout=8),
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a segment ends its subtree too early": (
        lambda piece: in_forest(piece, segments=with_segment(piece, 0, tout=8)),
        6,
        f"{FIRST}, response token 0",
    ),
    "a segment attends to a node that is not an ancestor": (
        lambda piece: in_forest(
            piece, segments=with_segment(piece, 2, path=((0, 3), (4, 5), (7, 9)))
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a segment attends to two ancestors twice": (
        lambda piece: in_forest(
            piece, segments=with_segment(piece, 2, path=((0, 2), (0, 2), (7, 9)))
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a segment's path runs over a leaf into itself": (
        lambda piece: in_forest(piece, segments=with_segment(piece, 2, path=((0, 3), (6, 9)))),
        1,
        f"{SECOND}, response token 2",
    ),
    "a segment does not attend to its ancestors": (
        lambda piece: in_forest(
            piece,
            segments=[
                replace(segment, path=segment.path[-1:] if len(segment.path) > 1 else segment.path)
                for segment in piece.plan.forest.segments
            ],
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a call has the path of another call": (
        lambda piece: in_forest(
            piece,
            paths=[((0, 5),), ((0, 6),), piece.plan.forest.paths[2]],
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a call's path ends too early": (
        lambda piece: in_forest(piece, paths=[((0, 4),), *piece.plan.forest.paths[1:]]),
        6,
        "a path is not as long as its call",
    ),
}


def test_the_original_plan_passes() -> None:
    assert check_piece(piece_of()) == PlanCheck(NUM_TOKENS, NUM_TOKENS, None)


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_plan_is_detected_and_located(name: str) -> None:
    change, num_wrong, fault = PLANS[name]
    piece = piece_of()
    result = check_plan(change(piece), SIBLINGS, piece.tokens.sampled_log_prob)

    assert result.num_tokens - result.num_correct == num_wrong
    assert result.fault is not None and result.fault.startswith(fault)


def test_a_path_through_another_tree_is_detected_although_its_ids_are_equal() -> None:
    """The calls share nothing, like calls of different adapters."""
    twins = [SIBLINGS[0], SIBLINGS[0]]
    cpu = torch.device("cpu")
    (piece,) = cut_into_pieces(twins, SPEC, 1000, cpu, shares_prefixes=False).pieces
    assert check_piece(piece, twins) == PlanCheck(4, 4, None)

    crossing = in_forest(piece, paths=[((0, 5),), ((0, 2), (7, 10))])
    result = check_plan(crossing, twins, piece.tokens.sampled_log_prob)
    assert (result.num_correct, result.fault and result.fault[:6]) == (2, "call 1")


def test_log_probabilities_shifted_by_one_token_are_detected() -> None:
    piece = piece_of()
    result = check_plan(piece.plan, SIBLINGS, piece.tokens.sampled_log_prob.roll(1))
    # The first two calls begin with the same number, and so does what moves there.
    assert result.num_correct < NUM_TOKENS and result.fault is not None
    assert result.fault.startswith(f"{FIRST}, response token 0")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (replace(SIBLINGS[1], response_ids=[4, 6, 8]), f"{SECOND}, response token 2"),
        (replace(SIBLINGS[1], prompt_ids=[1, 9, 3]), f"{SECOND}, response token 0"),
        (replace(SIBLINGS[1], logprobs=[-0.5, -0.75, -1.25]), f"{SECOND}, response token 2"),
        (replace(SIBLINGS[1], logprobs=[-0.5, -0.75]), f"{SECOND} has another number"),
        (replace(SIBLINGS[1], response_ids=[4, 6], logprobs=[-0.5, -0.75]), "the gather has"),
    ],
)
def test_a_call_with_a_different_record_is_named(changed: Call, fault: str) -> None:
    recorded = [SIBLINGS[0], changed, SIBLINGS[2]]
    result = check_plan(piece_of().plan, recorded, piece_of().tokens.sampled_log_prob)

    assert result.num_correct < NUM_TOKENS
    assert result.fault is not None and result.fault.startswith(fault)


def test_a_recorded_nan_log_probability_passes_the_check() -> None:
    """The loss detects NaN later."""
    call = replace(SIBLINGS[0], logprobs=[float("nan"), -1.0])
    assert check_piece(piece_of([call]), [call]).fault is None


def test_a_piece_without_tokens_passes_the_check() -> None:
    empty = Call("g", [], [], [], 0, 1.0, 1.0, 1.0)
    prompt_only = Call("g", [1, 2], [], [], 0, 1.0, 1.0, 1.0)
    for calls in ([empty], [prompt_only], [*SIBLINGS, empty, prompt_only]):
        result = check_piece(piece_of(calls), calls)
        assert result.fault is None and result.num_correct == result.num_tokens


def test_a_token_must_have_its_recorded_set() -> None:
    few, fewer, one = (packed(bytes([bits])) for bits in (0b1110000, 0b1010000, 0b10000))
    call = replace(SIBLINGS[1], allowed=TokenMasks.from_packed_sets([few, None, few]))
    assert check_piece(piece_of([call]), [call]) == PlanCheck(3, 3, None)

    other = replace(call, allowed=TokenMasks.from_packed_sets([few, None, fewer]))
    result = check_piece(piece_of([call]), [other])
    assert (result.num_correct, result.fault) == (
        2,
        "call 0 (group g), response token 2, is not what was recorded",
    )
    forced = replace(call, allowed=TokenMasks.from_packed_sets([one, None, few]))
    assert check_piece(piece_of([forced]), [forced]) == PlanCheck(2, 2, None)


def test_a_plan_that_trains_a_forced_token_is_detected() -> None:
    """Every tensor is right, but the token would wrongly count in the denominators."""
    few, one = packed(bytes([0b1110000])), packed(bytes([0b10000]))
    call = replace(SIBLINGS[1], allowed=TokenMasks.from_packed_sets([one, None, few]))
    ids, num_prompt = [*call.prompt_ids, *call.response_ids], len(call.prompt_ids)
    sets = [*[None] * num_prompt, one, None, few]
    all_trained = CallTokens(ids, [(num_prompt, len(ids))], temperature=1.0, allowed_sets=sets)

    result = check_plan(Plan.of(build_forest([all_trained])), [call], torch.tensor(call.logprobs))

    assert result.num_correct == 0 and result.fault is not None
    assert "another number of tokens than the calls" in result.fault
