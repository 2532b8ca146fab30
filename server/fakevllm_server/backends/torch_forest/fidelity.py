"""Is what a plan feeds and gathers what the calls recorded? Asked of every step, before it trains.

For each trained token, three things must hold:

    I1  its edge asks for the id that was sampled there, from the node before it, at the call's
        temperature and out of the set it was chosen from
    I2  that node sees the call's own tokens up to there, in order, at their own positions, and
        nothing else
    I3  the log-probability it is compared with is the recorded one

Read off the tensors a forward pass takes, and the parents, subtree ends and segments its layouts
are made of, against the calls alone. What a kernel makes of them is for `self_check`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.plan import Plan, as_tensor
from fakevllm_server.forest import Forest
from fakevllm_server.types.token_masks import WHOLE, TokenMasks


class Recorded(Protocol):
    """A call of a batch."""

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
class Fidelity:
    num_tokens: int
    num_true: int
    fault: str | None = None
    """The first token that is not what was recorded, as one clause; None if all are."""


def fidelity(plan: Plan, calls: Sequence[Recorded], sampled_log_prob: Tensor) -> Fidelity:
    """`calls` are those the plan was made of, in its order; `sampled_log_prob` is [tokens], as the
    loss will take it, beside `plan.flat`."""
    total = sum(plan.num_trained)
    for number, call in enumerate(calls):
        if len(call.logprobs) != len(call.response_ids):
            fault = f"{_name(calls, number)} has another number of log-probabilities than of tokens"
            return Fidelity(total, 0, fault)
    chosen = _chosen(plan, calls)
    if chosen is None or not total == len(plan.gather) == len(sampled_log_prob):
        return Fidelity(total, 0, "the gather has another number of tokens than the calls")
    laid = _Laid.of(plan, calls)
    if laid is None:
        return Fidelity(total, 0, "a path is not as long as its call")
    wrong = (~_is_true(plan, calls, laid, chosen, sampled_log_prob)).nonzero()
    if not len(wrong):
        return Fidelity(total, total)
    at = int(chosen.nonzero()[int(wrong[0])])
    return Fidelity(total, total - len(wrong), _named(calls, at))


def _chosen(plan: Plan, calls: Sequence[Recorded]) -> Tensor | None:
    """[response tokens] Those that train; None where the plan has another number of them."""
    if len(calls) != len(plan.num_trained):
        return None
    found = [list(call.is_trained) for call in calls]
    if [sum(row) for row in found] != list(plan.num_trained):
        return None
    return torch.tensor(list(chain.from_iterable(found)), dtype=torch.bool)


def _is_true(
    plan: Plan, calls: Sequence[Recorded], laid: _Laid, chosen: Tensor, sampled_log_prob: Tensor
) -> Tensor:
    """[tokens]"""
    place = laid.responses[chosen]
    gather, is_edge = _inside(plan.gather.cpu(), plan.num_edges)
    if not plan.num_edges:
        return is_edge
    head, is_head = _inside(plan.edge_head.cpu()[gather], len(plan.head_node))
    of_calls = torch.tensor([call.temperature for call in calls], dtype=torch.float64)
    number = torch.tensor([len(call.response_ids) for call in calls])
    temperature = of_calls.repeat_interleave(number)[chosen]
    recorded = _floats(call.logprobs for call in calls)[chosen].to(sampled_log_prob.dtype)
    return (
        is_edge
        & is_head
        & (plan.edge_token.cpu()[gather] == laid.recorded[place])
        & (plan.head_node.cpu()[head] == laid.row[place - 1])
        & (plan.head_temperature[head] == temperature)
        & (as_tensor(plan.forest.edges.head_set, "cpu")[head] == _sets(plan, calls)[chosen])
        & laid.is_true_up_to[place - 1]
        & torch.isclose(sampled_log_prob.cpu(), recorded, rtol=0, atol=0, equal_nan=True)
    )


def _sets(plan: Plan, calls: Sequence[Recorded]) -> Tensor:
    """[response tokens] The plan's number of the set each was chosen from."""
    numbers = {one: number for number, one in enumerate(plan.forest.edges.sets)}
    flat = array("q")
    for call in calls:
        if call.allowed is None:
            flat.extend(array("q", [WHOLE]) * len(call.response_ids))
        else:
            own = [numbers.get(one, WHOLE - 1) for one in call.allowed.sets]
            flat.extend(WHOLE if at == WHOLE else own[at] for at in call.allowed.of_token)
    return as_tensor(flat, "cpu")


class _Laid(NamedTuple):
    """All calls, one after another, [their tokens] each."""

    recorded: Tensor
    """Ids."""
    row: Tensor
    """Nodes."""
    is_true_up_to: Tensor
    """Whether this and all positions before it are what the call says."""
    responses: Tensor
    """[response tokens] Where they stand."""

    @staticmethod
    def of(plan: Plan, calls: Sequence[Recorded]) -> _Laid | None:
        """None where a path has another length than its call."""
        paths = plan.forest.paths
        prompts = torch.tensor([len(call.prompt_ids) for call in calls], dtype=torch.long)
        answers = torch.tensor([len(call.response_ids) for call in calls], dtype=torch.long)
        lengths = prompts + answers
        if [sum(end - start for start, end in path) for path in paths] != lengths.tolist():
            return None
        firsts = lengths.cumsum(0) - lengths
        recorded = _ints(chain.from_iterable((one.prompt_ids, one.response_ids) for one in calls))
        position = torch.arange(len(recorded)) - firsts.repeat_interleave(lengths)
        row, is_node = _inside(_run_by_run(list(chain.from_iterable(paths))), plan.forest.num_nodes)
        is_true = is_node & _follows(plan, row, position) & (plan.ids.cpu()[row] == recorded)
        num_wrong = torch.nn.functional.pad((~is_true).cumsum(0), (1, 0))
        before = num_wrong[firsts].repeat_interleave(lengths)
        responses = (position >= prompts.repeat_interleave(lengths)).nonzero()[:, 0]
        return _Laid(recorded, row, num_wrong[1:] == before, responses)


def _follows(plan: Plan, row: Tensor, position: Tensor) -> Tensor:
    """Whether each token of each call lies below the one before it, and sees what that sees and
    itself."""
    parent = as_tensor(plan.forest.parent, "cpu")[row]
    before = torch.nn.functional.pad(row[:-1], (1, 0), value=-1)
    before = torch.where(position == 0, -1, before)
    return (parent == before) & _sound(plan)[row]


def _sound(plan: Plan) -> Tensor:
    """[nodes] Whether all its ancestors see it, as its segment's path has them, and no other node:
    it is in as many subtrees as its position says."""
    forest = plan.forest
    num = forest.num_nodes
    parent, tout = as_tensor(forest.parent, "cpu"), as_tensor(forest.tout, "cpu")
    ends = torch.bincount(tout.clamp(0, num), minlength=num + 1)[:num]
    num_seen = torch.arange(num) + 1 - ends.cumsum(0)
    return (num_seen == plan.pos.cpu() + 1) & _sound_segments(forest, parent, tout)


def _sound_segments(forest: Forest, parent: Tensor, tout: Tensor) -> Tensor:
    """[nodes] Whether its segment ends subtrees where the nodes do (so that it is a run without a
    branch), and the segment's path is all its ancestors, each once, and its own end."""
    num = forest.num_nodes
    segments = forest.segments
    covers = [0, *(one.end for one in segments)] == [*(one.start for one in segments), num]
    if not covers or not segments:
        return torch.zeros(num, dtype=torch.bool)
    slices = [(start, end) for one in segments for start, end in one.path]
    count = torch.tensor([len(one.path) for one in segments])
    last = torch.tensor([one.end - 1 for one in segments])
    start, end = torch.tensor(slices).unbind(1)
    # A slice is a run of first children: a break is a node whose parent is not the one before it.
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
    depth = torch.tensor([one.depth + one.end - one.start for one in segments])
    touts = torch.tensor([one.tout for one in segments])
    firsts = torch.tensor([one.start for one in segments])
    is_sound = (num_bad == 0) & (length == depth)
    size = last - firsts + 1
    is_sound &= torch.tensor([one.path[-1][1] - 1 for one in segments]) == last
    return is_sound.repeat_interleave(size) & (tout == touts.repeat_interleave(size))


def _inside(numbers: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """As indices that may be used, and whether they are what was asked for."""
    is_inside = (numbers >= 0) & (numbers < limit)
    return torch.where(is_inside, numbers, 0), is_inside


def _run_by_run(runs: Sequence[tuple[int, int]]) -> Tensor:
    """[(0, 2), (5, 7)] -> [0, 1, 5, 6]"""
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


def _named(calls: Sequence[Recorded], at: int) -> str:
    for number, call in enumerate(calls):
        if at < len(call.response_ids):
            return f"{_name(calls, number)}, response token {at}, is not what was recorded"
        at -= len(call.response_ids)
    raise AssertionError("a token beyond the last call")


def _name(calls: Sequence[Recorded], number: int) -> str:
    return f"call {number} (group {calls[number].group_id})"
