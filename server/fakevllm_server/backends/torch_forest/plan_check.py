"""Before every training step, check that the plans of the step contain the recorded tokens.

A plan has the tensors for one forward pass over a forest: the calls of a step, merged so that a
shared prefix is computed once. Each token of the forest is a node. The recorded calls have the
tokens and log-probabilities that the rollout engine reported.

In a plan, an *edge* is the prediction of one trained token. A *head* is a node at which tokens are
predicted, with a temperature and a set of allowed tokens. Three invariants must hold for each
trained token:

    I1  The token's edge has the sampled token id. The edge's head is the node of the preceding
        token. The head has the call's temperature, and the set of tokens that could be sampled.
    I2  The node of the preceding token attends to exactly the call's tokens up to and including
        this node, in order and at their positions.
    I3  The sampled log-probability that the loss reads is the recorded log-probability.

The check covers the tensors that a forward pass reads. It also covers the parents, subtree ends and
segments of the forest, because the attention methods use them. The module `attention_check` checks
the attention kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.forward_plan import Plan, as_tensor
from fakevllm_server.forest import Forest
from fakevllm_server.types.token_masks import WHOLE, TokenMasks


class RecordedCall(Protocol):
    """A call as the rollout engine reported it, with the fields that the plan check reads."""

    @property
    def group_id(self) -> str: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def is_trained(self) -> Sequence[bool]: ...
    @property
    def allowed(self) -> TokenMasks | None: ...


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The result of `check_plan`: whether the tensors of one plan (one forward pass over merged
    calls) contain the recorded tokens."""

    num_tokens: int
    num_correct: int
    """Number of tokens for which all three invariants hold."""
    fault: str | None = None
    """Description of the first difference between the plan and the recorded calls, as one clause.
    None if there is no difference."""


def check_plan(plan: Plan, calls: Sequence[RecordedCall], sampled_log_prob: Tensor) -> PlanCheck:
    """Compare the tensors of a plan with the recorded calls, and return the result. `calls` are in
    the order of the plan. `sampled_log_prob` has the values that the loss will read as
    log-probabilities at sampling time, [trained tokens] in the order of `plan.flat`."""
    total = sum(plan.num_trained)
    for number, call in enumerate(calls):
        if len(call.logprobs) != len(call.response_ids):
            fault = f"{_name(calls, number)} has another number of log-probabilities than of tokens"
            return PlanCheck(total, 0, fault)
    is_trained = _trained_mask(plan, calls)
    if is_trained is None or not total == len(plan.gather) == len(sampled_log_prob):
        return PlanCheck(total, 0, "the gather has another number of tokens than the calls")
    rows = _CallRows.of(plan, calls)
    if rows is None:
        return PlanCheck(total, 0, "a path is not as long as its call")
    wrong = (~_is_correct(plan, calls, rows, is_trained, sampled_log_prob)).nonzero()
    if not len(wrong):
        return PlanCheck(total, total)
    at = int(is_trained.nonzero()[int(wrong[0])])
    return PlanCheck(total, total - len(wrong), _token_fault(calls, at))


def _trained_mask(plan: Plan, calls: Sequence[RecordedCall]) -> Tensor | None:
    """Return a mask, [response tokens of all calls] of bool, that is True for trained tokens.
    Return None if the plan and `calls` differ in the number of calls, or in the number of trained
    tokens of a call."""
    if len(calls) != len(plan.num_trained):
        return None
    is_trained = [list(call.is_trained) for call in calls]
    if [sum(row) for row in is_trained] != list(plan.num_trained):
        return None
    return torch.tensor(list(chain.from_iterable(is_trained)), dtype=torch.bool)


def _is_correct(
    plan: Plan,
    calls: Sequence[RecordedCall],
    rows: _CallRows,
    is_trained: Tensor,
    sampled_log_prob: Tensor,
) -> Tensor:
    """Return a mask, [trained tokens] of bool. It is True for each trained token for which the
    invariants I1, I2 and I3 hold. The docstring of this module defines them."""
    position = rows.responses[is_trained]
    gather, is_edge = _clipped_indices(plan.gather.cpu(), plan.num_edges)
    if not plan.num_edges:
        return is_edge
    head, is_head = _clipped_indices(plan.edge_head.cpu()[gather], len(plan.head_node))
    temperatures = torch.tensor([call.temperature for call in calls], dtype=torch.float64)
    lengths = torch.tensor([len(call.response_ids) for call in calls])
    temperature = temperatures.repeat_interleave(lengths)[is_trained]
    recorded = _floats(call.logprobs for call in calls)[is_trained].to(sampled_log_prob.dtype)
    return (
        is_edge
        & is_head
        & (plan.edge_token.cpu()[gather] == rows.recorded_ids[position])
        & (plan.head_node.cpu()[head] == rows.nodes[position - 1])
        & (plan.head_temperature[head] == temperature)
        & (
            as_tensor(plan.forest.edges.head_set, "cpu")[head]
            == _set_indices(plan, calls)[is_trained]
        )
        & rows.is_correct_so_far[position - 1]
        & torch.isclose(sampled_log_prob.cpu(), recorded, rtol=0, atol=0, equal_nan=True)
    )


def _set_indices(plan: Plan, calls: Sequence[RecordedCall]) -> Tensor:
    """Return one index for each response token of all calls. The index selects the token's set of
    allowed tokens in the plan's list of sets. WHOLE means that every token was allowed. WHOLE - 1
    means that the plan lacks the set."""
    numbers = {packed: number for number, packed in enumerate(plan.forest.edges.sets)}
    flat = array("q")
    for call in calls:
        if call.allowed is None:
            flat.extend(array("q", [WHOLE]) * len(call.response_ids))
        else:
            indices = [numbers.get(packed, WHOLE - 1) for packed in call.allowed.sets]
            flat.extend(WHOLE if at == WHOLE else indices[at] for at in call.allowed.set_indices)
    return as_tensor(flat, "cpu")


class _CallRows(NamedTuple):
    """The tokens of all calls, one call after another. Each field is a tensor [tokens of all
    calls], unless its own docstring says something else."""

    recorded_ids: Tensor
    nodes: Tensor
    """The plan's node of each token."""
    is_correct_so_far: Tensor
    """Whether this token and all earlier tokens of its call are the recorded tokens."""
    responses: Tensor
    """[response tokens] Indices of the response tokens."""

    @staticmethod
    def of(plan: Plan, calls: Sequence[RecordedCall]) -> _CallRows | None:
        """Return the _CallRows of `calls`: their recorded tokens, with the plan's node for each
        token. A node is a token of the merged calls. The nodes of a call are those on the call's
        path in the plan. Return None if a path and its call differ in length."""
        paths = plan.forest.paths
        prompts = torch.tensor([len(call.prompt_ids) for call in calls], dtype=torch.long)
        answers = torch.tensor([len(call.response_ids) for call in calls], dtype=torch.long)
        lengths = prompts + answers
        if [sum(end - start for start, end in path) for path in paths] != lengths.tolist():
            return None
        firsts = lengths.cumsum(0) - lengths
        recorded = _ints(
            chain.from_iterable((call.prompt_ids, call.response_ids) for call in calls)
        )
        position = torch.arange(len(recorded)) - firsts.repeat_interleave(lengths)
        path_nodes = _expand_runs(list(chain.from_iterable(paths)))
        nodes, is_node = _clipped_indices(path_nodes, plan.forest.num_nodes)
        is_correct = (
            is_node & _continues(plan, nodes, position) & (plan.ids.cpu()[nodes] == recorded)
        )
        num_wrong = torch.nn.functional.pad((~is_correct).cumsum(0), (1, 0))
        before = num_wrong[firsts].repeat_interleave(lengths)
        responses = (position >= prompts.repeat_interleave(lengths)).nonzero()[:, 0]
        return _CallRows(recorded, nodes, num_wrong[1:] == before, responses)


def _continues(plan: Plan, nodes: Tensor, position: Tensor) -> Tensor:
    """Return a mask, [tokens of all calls] of bool. It is True for each token whose node correctly
    continues the call. Two conditions must hold. First, the node is a child of the previous token's
    node, or a root if the token is the first one. Second, the node attends to exactly its ancestors
    and itself."""
    parent = as_tensor(plan.forest.parent, "cpu")[nodes]
    before = torch.nn.functional.pad(nodes[:-1], (1, 0), value=-1)
    before = torch.where(position == 0, -1, before)
    return (parent == before) & _has_consistent_ancestors(plan)[nodes]


def _has_consistent_ancestors(plan: Plan) -> Tensor:
    """Return a mask, [nodes] of bool. It is True for each node (token of the forest) that attends
    to exactly its ancestors and itself.

    Two conditions are checked for each node. First, the mask of `_has_consistent_segment` must be
    True for the node. Second, the number of ancestors must be equal to the node's position. The
    subtree of each ancestor contains the node, and so does the node's own subtree. Therefore the
    number of subtrees that contain the node must be its position + 1.
    """
    forest = plan.forest
    num = forest.num_nodes
    parent, tout = as_tensor(forest.parent, "cpu"), as_tensor(forest.tout, "cpu")
    ends = torch.bincount(tout.clamp(0, num), minlength=num + 1)[:num]
    num_seen = torch.arange(num) + 1 - ends.cumsum(0)
    return (num_seen == plan.pos.cpu() + 1) & _has_consistent_segment(forest, parent, tout)


def _has_consistent_segment(forest: Forest, parent: Tensor, tout: Tensor) -> Tensor:
    """Return a mask, [nodes] of bool. It is True for each node whose segment meets two conditions.
    A segment is a range of consecutive nodes (tokens of the forest) without a branch.

    * All nodes of the segment have the same subtree end (`tout`). Otherwise, the segment would have
      a branch.
    * The path of the segment (the nodes to which the segment attends) contains each ancestor once,
      and ends with the segment's own nodes.

    If the segments do not cover all nodes, the mask is False for every node.
    """
    num = forest.num_nodes
    segments = forest.segments
    covers = [0, *(segment.end for segment in segments)] == [
        *(segment.start for segment in segments),
        num,
    ]
    if not covers or not segments:
        return torch.zeros(num, dtype=torch.bool)
    slices = [(start, end) for segment in segments for start, end in segment.path]
    count = torch.tensor([len(segment.path) for segment in segments])
    last = torch.tensor([segment.end - 1 for segment in segments])
    start, end = torch.tensor(slices).unbind(1)
    # A slice is a run of first children. A break is a node whose parent is not the node before it.
    breaks = torch.nn.functional.pad((parent != torch.arange(num) - 1).cumsum(0), (1, 0))
    is_run = breaks[end] == breaks[start + 1]
    query = last.repeat_interleave(count)
    owner = torch.arange(len(segments)).repeat_interleave(count)
    is_next = torch.ones_like(is_run)
    is_next[1:] = (start[1:] >= end[:-1]) | (owner[1:] != owner[:-1])
    is_above = (end - 1 <= query) & (query < tout[end - 1]) & is_run & is_next
    zero = torch.zeros(len(segments), dtype=torch.long)
    num_bad = zero.index_add(0, owner, (~is_above).long())
    length = zero.index_add(0, owner, end - start)
    depth = torch.tensor([segment.depth + segment.end - segment.start for segment in segments])
    touts = torch.tensor([segment.tout for segment in segments])
    firsts = torch.tensor([segment.start for segment in segments])
    is_consistent = (num_bad == 0) & (length == depth)
    size = last - firsts + 1
    is_consistent &= torch.tensor([segment.path[-1][1] - 1 for segment in segments]) == last
    return is_consistent.repeat_interleave(size) & (tout == touts.repeat_interleave(size))


def _clipped_indices(numbers: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return (indices, mask), both with the shape of `numbers`. The mask is True where a number is
    in [0, limit). `indices` has the same numbers, but with 0 in place of those outside this
    range."""
    is_inside = (numbers >= 0) & (numbers < limit)
    return torch.where(is_inside, numbers, 0), is_inside


def _expand_runs(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return all members of the ranges [start, end) as one tensor. For example, [(0, 2), (5, 7)]
    becomes [0, 1, 5, 6]."""
    if not runs:
        return torch.empty(0, dtype=torch.long)
    starts, ends = torch.tensor(runs).unbind(1)
    lengths = ends - starts
    offsets = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + offsets.repeat_interleave(lengths)


def _ints(rows: Iterable[Sequence[int]]) -> Tensor:
    flat = array("q")
    for row in rows:
        flat.extend(array("q", row))
    return as_tensor(flat, "cpu")


def _floats(rows: Iterable[Sequence[float]]) -> Tensor:
    flat = array("d")
    for row in rows:
        flat.extend(array("d", row))
    return torch.frombuffer(flat, dtype=torch.float64) if flat else torch.empty(0)


def _token_fault(calls: Sequence[RecordedCall], at: int) -> str:
    for number, call in enumerate(calls):
        if at < len(call.response_ids):
            return f"{_name(calls, number)}, response token {at}, is not what was recorded"
        at -= len(call.response_ids)
    raise AssertionError("a token beyond the last call")


def _name(calls: Sequence[RecordedCall], number: int) -> str:
    return f"call {number} (group {calls[number].group_id})"
