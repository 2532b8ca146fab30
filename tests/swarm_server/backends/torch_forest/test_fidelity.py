"""The fidelity check detects and names every difference between a plan and the recorded calls."""

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

from fakevllm_server.backends.embedded.train.step_pieces import StepPiece, cut_into_pieces
from fakevllm_server.backends.torch_forest.fidelity import Fidelity, check_fidelity
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.types.backend import Call

SIBLINGS = [
    Call("g", [1, 2, 3], [4, 5], [-0.5, -0.25], 0, 1.0, 1.0, 1.0),
    Call("g", [1, 2, 3], [4, 6, 7], [-0.5, -0.75, -1.5], 0, 1.0, -0.5, 1.0),
    Call("h", [1, 2, 3, 4, 5, 9], [8], [-2.0], 0, 0.7, -0.5, 1.0),
]
"""Two calls that share a sampled token, and a third that continues the first at another
temperature."""
NUM_TOKENS = 6


def fidelity_of(piece: StepPiece, calls: Sequence[Call] = SIBLINGS, **changed: Any) -> Fidelity:
    plan = replace(piece.plan, **changed) if changed else piece.plan
    own = [calls[index] for index in piece.calls]
    return check_fidelity(plan, own, piece.tokens.sampled_log_prob)


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
        Call("g", [*one.prompt_ids, *one.response_ids, 9], [7, 8], [-1.0, -2.0], 0, 1.0, 1.0, 1.0)
        for one in calls[:6]
    ]
    calls = [*calls, *calls[:3], *turns]
    found = [fidelity_of(piece, calls) for piece in pieces(calls, max_tokens).pieces]

    assert [one.fault for one in found] == [None] * len(found)
    assert sum(one.num_true for one in found) == sum(len(call.response_ids) for call in calls)


def swapped(numbers: torch.Tensor, one: int, other: int) -> torch.Tensor:
    copy = numbers.clone()
    copy[[one, other]] = copy[[other, one]]
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
    "the id that the last token is predicted behind is another": (
        lambda piece: replace(piece.plan, ids=moved(piece.plan.ids, 5)),
        1,
        f"{THIRD}, response token 0",
    ),
    "the first id of all is another": (
        lambda piece: replace(piece.plan, ids=moved(piece.plan.ids, 0)),
        6,
        f"{FIRST}, response token 0",
    ),
    "a position is another": (
        lambda piece: replace(piece.plan, pos=moved(piece.plan.pos, 7)),
        1,
        f"{SECOND}, response token 2",
    ),
    "an edge asks for another id": (
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
    "logits are cut to a set nobody recorded": (
        lambda piece: in_edges(
            piece, head_set=array("q", [0, *piece.plan.forest.edges.head_set[1:]])
        ),
        1,
        f"{THIRD}, response token 0",
    ),
    "a node is not seen by all that is below it": (
        lambda piece: with_tout(piece, 0, 4),
        6,
        f"{FIRST}, response token 0",
    ),
    "a node is seen by the branch beside it": (
        lambda piece: with_tout(piece, 6, 9),
        1,
        f"{SECOND}, response token 2",
    ),
    "a node hangs below another": (
        lambda piece: with_parent(piece, 7, 4),
        1,
        f"{SECOND}, response token 2",
    ),
    "a subtree ends before its own nodes do": (
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
    "a segment sees a stranger for an ancestor": (
        lambda piece: in_forest(
            piece, segments=with_segment(piece, 2, path=((0, 3), (4, 5), (7, 9)))
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a segment sees two ancestors twice": (
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
    "a segment does not see what it branches from": (
        lambda piece: in_forest(
            piece,
            segments=[
                replace(one, path=one.path[-1:] if len(one.path) > 1 else one.path)
                for one in piece.plan.forest.segments
            ],
        ),
        1,
        f"{SECOND}, response token 2",
    ),
    "a call runs along another's path": (
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
    assert fidelity_of(piece_of()) == Fidelity(NUM_TOKENS, NUM_TOKENS, None)


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_plan_is_detected_and_located(name: str) -> None:
    spoil, num_wrong, where = PLANS[name]
    piece = piece_of()
    found = check_fidelity(spoil(piece), SIBLINGS, piece.tokens.sampled_log_prob)

    assert found.num_tokens - found.num_true == num_wrong
    assert found.fault is not None and found.fault.startswith(where)


def test_a_path_through_another_tree_is_detected_although_its_ids_are_equal() -> None:
    """The calls share nothing, like calls of different adapters."""
    twins = [SIBLINGS[0], SIBLINGS[0]]
    cpu = torch.device("cpu")
    (piece,) = cut_into_pieces(twins, SPEC, 1000, cpu, shares_prefixes=False).pieces
    assert fidelity_of(piece, twins) == Fidelity(4, 4, None)

    crossing = in_forest(piece, paths=[((0, 5),), ((0, 2), (7, 10))])
    found = check_fidelity(crossing, twins, piece.tokens.sampled_log_prob)
    assert (found.num_true, found.fault and found.fault[:6]) == (2, "call 1")


def test_log_probabilities_shifted_by_one_token_are_detected() -> None:
    piece = piece_of()
    found = check_fidelity(piece.plan, SIBLINGS, piece.tokens.sampled_log_prob.roll(1))
    # The first two calls begin with the same number, and so does what moves there.
    assert found.num_true < NUM_TOKENS and found.fault is not None
    assert found.fault.startswith(f"{FIRST}, response token 0")


@pytest.mark.parametrize(
    ("spoiled", "where"),
    [
        (replace(SIBLINGS[1], response_ids=[4, 6, 8]), f"{SECOND}, response token 2"),
        (replace(SIBLINGS[1], prompt_ids=[1, 9, 3]), f"{SECOND}, response token 0"),
        (replace(SIBLINGS[1], logprobs=[-0.5, -0.75, -1.25]), f"{SECOND}, response token 2"),
        (replace(SIBLINGS[1], logprobs=[-0.5, -0.75]), f"{SECOND} has another number"),
        (replace(SIBLINGS[1], response_ids=[4, 6], logprobs=[-0.5, -0.75]), "the gather has"),
    ],
)
def test_a_call_with_a_different_record_is_named(spoiled: Call, where: str) -> None:
    recorded = [SIBLINGS[0], spoiled, SIBLINGS[2]]
    found = check_fidelity(piece_of().plan, recorded, piece_of().tokens.sampled_log_prob)

    assert found.num_true < NUM_TOKENS
    assert found.fault is not None and found.fault.startswith(where)


def test_a_recorded_nan_log_probability_passes_the_check() -> None:
    """The loss detects NaN later."""
    call = replace(SIBLINGS[0], logprobs=[float("nan"), -1.0])
    assert fidelity_of(piece_of([call]), [call]).fault is None


def test_a_piece_without_tokens_passes_the_check() -> None:
    nothing = Call("g", [], [], [], 0, 1.0, 1.0, 1.0)
    prompt_only = Call("g", [1, 2], [], [], 0, 1.0, 1.0, 1.0)
    for calls in ([nothing], [prompt_only], [*SIBLINGS, nothing, prompt_only]):
        found = fidelity_of(piece_of(calls), calls)
        assert found.fault is None and found.num_true == found.num_tokens
