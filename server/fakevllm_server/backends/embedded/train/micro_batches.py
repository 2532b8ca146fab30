"""Cut the calls of a training step into pieces. Each piece is a set of calls that go through the
model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby, repeat

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.prefix_sharing import unshare_small_prefixes
from fakevllm_server.backends.torch_losses.demonstration_rows import DemonstrationRows
from fakevllm_server.backends.torch_losses.trained_tokens import TrainedTokens
from fakevllm_server.backends.training.step_calls import shares_of, unit_of
from fakevllm_server.forest import CallTokens, pack
from fakevllm_server.types.backend import Call, LossSpec, StepMetrics
from fakevllm_server.types.demonstrations import Demonstration


@dataclass(frozen=True, slots=True)
class StepPiece:
    """One piece of a training step: a set of calls that go through the model together."""

    plan: Plan
    tokens: TrainedTokens
    """The trained tokens, in the order of `plan.flat`."""
    calls: Sequence[int]
    """Indices of the piece's calls within the step, in the order of the plan."""
    is_equal_version: Tensor
    """[tokens] For each token, whether all tokens of its call were sampled with the trainer's
    current weights."""


@dataclass(frozen=True, slots=True)
class StepPieces:
    """All pieces (sets of calls that go through the model together) of one training step. Each call
    of the step is in exactly one piece."""

    pieces: Sequence[StepPiece]
    whole: TrainedTokens | None
    """The tokens of all pieces, one piece after another, if the loss couples tokens of different
    pieces; else None."""

    @property
    def metrics(self) -> StepMetrics:
        """Metrics of prefix sharing. `tokens_computed` is the number of tokens that go through the
        model. `tokens_saved` is the number of tokens of all calls minus `tokens_computed`. `rho` is
        the number of tokens of all calls divided by `tokens_computed`."""
        forests = [piece.plan.forest for piece in self.pieces]
        computed = sum(forest.num_nodes for forest in forests)
        naive = sum(forest.num_naive for forest in forests)
        return {
            "tokens_computed": float(computed),
            "tokens_saved": float(naive - computed),
            "rho": naive / computed if computed else 1.0,
        }

    def per_call(self, values_per_piece: Sequence[Tensor]) -> list[list[float]]:
        """Return one list for each call, with the values of the call's trained tokens. The lists
        are in the order of the step's calls. `values_per_piece` has a tensor [trained tokens] for
        each piece (a set of calls that go through the model together)."""
        rows: dict[int, list[float]] = {}
        for piece, values in zip(self.pieces, values_per_piece, strict=True):
            own = values.split(list(piece.plan.num_trained))
            rows |= {at: row.tolist() for at, row in zip(piece.calls, own, strict=True)}
        return [rows[at] for at in range(len(rows))]

    def with_old(self, log_probs: Sequence[Tensor]) -> StepPieces:
        """Return a copy with the log-probabilities of the old policy, which is the trainer's policy
        before the step. `log_probs` has a tensor [trained tokens] for each piece (a set of calls
        that go through the model together)."""
        return self._with_field("old_log_prob", log_probs)

    def with_reference(self, log_probs: Sequence[Tensor]) -> StepPieces:
        """Return a copy with the log-probabilities of the reference policy. `log_probs` has a
        tensor [trained tokens] for each piece (a set of calls that go through the model
        together)."""
        return self._with_field("reference_log_prob", log_probs)

    def _with_field(self, name: str, log_probs: Sequence[Tensor]) -> StepPieces:
        pieces = [
            replace(piece, tokens=replace(piece.tokens, **{name: own}))
            for piece, own in zip(self.pieces, log_probs, strict=True)
        ]
        whole = self.whole
        if whole is not None:
            whole = replace(whole, **{name: torch.cat(list(log_probs))})
        return StepPieces(pieces, whole)


def cut_into_pieces(
    calls: Sequence[Call],
    spec: LossSpec,
    max_tokens: int,
    device: torch.device,
    *,
    shares_prefixes: bool,
    version: int | None = None,
    demonstrations: Sequence[Demonstration] = (),
) -> StepPieces:
    """Cut the calls of a step into pieces (sets of calls that go through the model together). A
    piece has at most `max_tokens` computed tokens. A token that several calls of a piece share is
    computed once.

    If the longest call alone exceeds `max_tokens`, the limit becomes `max_tokens` plus the length
    of this call. The piece with the longest call then has room for other calls. Calls that share
    most of their tokens with the longest call add few tokens to this piece.

    Some losses couple the tokens of a unit (calls that the loss treats as one sequence). For such a
    loss, the calls of a unit stay in one piece unless they are too many for one piece. For any
    other loss, the calls of a group are kept together in the same way. `version` is the version of
    the trainer's weights, or None if it is unknown. Raises ValueError for calls with temperature 0,
    because greedy sampling has no log-probability to train on.

    `demonstrations` are the demonstrations of the step. The last elements of `calls` must be the
    calls that `demonstration_calls` returns for these demonstrations.
    """
    shares = shares_of(calls, spec)
    keys = [unit_of(call) if spec.couples_tokens else call.group_id for call in calls]
    call_tokens = _call_tokens(calls, shares_prefixes=shares_prefixes)
    longest = max((len(call.ids) for call in call_tokens), default=0)
    if longest > max_tokens:
        max_tokens += longest
    packed = pack(call_tokens, max_tokens, keys)

    num_sampled = len(calls) - len(demonstrations)
    own = [*repeat(None, num_sampled), *demonstrations]

    def tokens(indices: Sequence[int]) -> TrainedTokens:
        chosen = [_Trained(calls[index]) for index in indices]
        flat = TrainedTokens.of(chosen, [shares[index] for index in indices], device=device)
        if spec.of_demonstrations is None:
            return flat
        rows = DemonstrationRows.of(
            [calls[index].num_trained for index in indices],
            [own[index] for index in indices],
            demonstrations,
            spec.of_demonstrations,
            device=device,
        )
        return replace(flat, demonstrations=rows)

    def is_equal(indices: Sequence[int]) -> Tensor:
        number = torch.tensor([calls[index].num_trained for index in indices], dtype=torch.long)
        equal = torch.tensor([calls[index].version == version for index in indices])
        return equal.repeat_interleave(number).to(device)

    pieces = [
        StepPiece(Plan.of(one.forest, device), tokens(one.calls), one.calls, is_equal(one.calls))
        for one in packed
    ]
    order = [index for one in packed for index in one.calls]
    return StepPieces(pieces, tokens(order) if _splits(pieces, spec) else None)


def _splits(pieces: Sequence[StepPiece], spec: LossSpec) -> bool:
    """Return True if the loss of some token depends on tokens of another piece. A piece is a set of
    calls that go through the model together."""
    parts = [piece.tokens for piece in pieces]
    rows = [part.demonstrations for part in parts if part.demonstrations is not None]
    return (
        (spec.couples_tokens and not all(part.has_whole_units for part in parts))
        or (spec.couples_step and not all(part.has_whole_step for part in parts))
        or not all(one.is_whole for one in rows)
    )


def _call_tokens(calls: Sequence[Call], *, shares_prefixes: bool) -> list[CallTokens]:
    if any(call.temperature <= 0 for call in calls):
        raise ValueError("greedy calls have no log-probability to train on")
    call_tokens = [_tokens_of(call) for call in calls]
    if shares_prefixes:
        return unshare_small_prefixes(call_tokens)
    return [replace(call, root=index) for index, call in enumerate(call_tokens)]


def _tokens_of(call: Call) -> CallTokens:
    """Return the tokens of a call, with the spans of positions that are trained. A token that was
    the only allowed token at its position is not trained, because its log-probability is always
    0."""
    if call.allowed is None:
        return CallTokens.of(call.prompt_ids, call.response_ids, temperature=call.temperature)
    begin = len(call.prompt_ids)
    sets = [call.allowed.packed_set_at(at) for at in range(len(call.response_ids))]
    return CallTokens(
        [*call.prompt_ids, *call.response_ids],
        [(begin + start, begin + end) for start, end in _runs(call.is_trained)],
        temperature=call.temperature,
        allowed_sets=[*repeat(None, begin), *sets],
    )


def _runs(chosen: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of consecutive positions at which `chosen` is true."""
    runs: list[tuple[int, int]] = []
    start = 0
    for is_chosen, run in groupby(chosen):
        end = start + len(list(run))
        if is_chosen:
            runs.append((start, end))
        start = end
    return runs


class _Trained:
    """The data of one call that the loss reads: the call's advantage, and the log-probabilities
    that the rollout engine reported for the call's trained tokens."""

    def __init__(self, call: Call) -> None:
        self.advantage = call.advantage
        self.logprobs = list(compress(call.logprobs, call.is_trained))
