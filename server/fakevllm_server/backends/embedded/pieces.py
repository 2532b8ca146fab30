"""A step's calls, cut into pieces that go through the model one at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fakevllm_server.algorithms.loss_units import Counted, call_shares
from fakevllm_server.backends.base import Call, LossSpec, StepMetrics
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.sharing import worth_sharing
from fakevllm_server.backends.torch_losses.tokens import Tokens
from fakevllm_server.forest import CallTokens, pack


@dataclass(frozen=True, slots=True)
class StepPiece:
    plan: Plan
    tokens: Tokens
    """Those of `plan.flat`, in its order."""


@dataclass(frozen=True, slots=True)
class StepPieces:
    pieces: Sequence[StepPiece]
    whole: Tokens | None
    """All tokens, piece after piece, where the loss couples some of different pieces; else None."""

    @property
    def metrics(self) -> StepMetrics:
        """How many tokens go through the model, and how many times as many the calls have."""
        forests = [piece.plan.forest for piece in self.pieces]
        computed = sum(forest.num_nodes for forest in forests)
        naive = sum(forest.num_naive for forest in forests)
        return {"tokens_computed": float(computed), "rho": naive / computed if computed else 1.0}

    def beside(
        self, old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
    ) -> StepPieces:
        """With the log-probabilities of other policies, [tokens] for each piece."""
        pieces = [
            replace(
                piece,
                tokens=replace(
                    piece.tokens,
                    old_log_prob=None if old is None else old[at],
                    reference_log_prob=None if reference is None else reference[at],
                ),
            )
            for at, piece in enumerate(self.pieces)
        ]
        if self.whole is None:
            return StepPieces(pieces, None)
        whole = replace(
            self.whole,
            old_log_prob=None if old is None else torch.cat(list(old)),
            reference_log_prob=None if reference is None else torch.cat(list(reference)),
        )
        return StepPieces(pieces, whole)


def pieces_of(
    calls: Sequence[Call],
    spec: LossSpec,
    max_tokens: int,
    device: torch.device,
    *,
    shares_prefixes: bool,
) -> StepPieces:
    """At most `max_tokens` nodes a piece; a longer call goes alone. Groups, and the units of a
    loss that couples tokens, stay together where they fit."""
    counted = [Counted(unit_of(call), call.weight, len(call.response_ids)) for call in calls]
    shares = call_shares(counted, spec)
    keys = [unit_of(call) if spec.couples_tokens else call.group_id for call in calls]
    packed = pack(_wanted(calls, shares_prefixes=shares_prefixes), max_tokens, keys)

    def tokens(indices: Sequence[int]) -> Tokens:
        chosen = [calls[index] for index in indices]
        return Tokens.of(chosen, [shares[index] for index in indices], device=device)

    pieces = [StepPiece(Plan.of(one.forest, device), tokens(one.calls)) for one in packed]
    is_split = spec.couples_tokens and not all(one.tokens.has_whole_units for one in pieces)
    order = [index for one in packed for index in one.calls]
    return StepPieces(pieces, tokens(order) if is_split else None)


def unit_of(call: Call) -> Hashable:
    return id(call) if call.unit is None else call.unit


def _wanted(calls: Sequence[Call], *, shares_prefixes: bool) -> list[CallTokens]:
    if any(call.temperature <= 0 for call in calls):
        raise ValueError("greedy calls have no log-probability to train on")
    wanted = [
        CallTokens.of(call.prompt_ids, call.response_ids, temperature=call.temperature)
        for call in calls
    ]
    if shares_prefixes:
        return worth_sharing(wanted)
    return [replace(one, root=index) for index, one in enumerate(wanted)]
