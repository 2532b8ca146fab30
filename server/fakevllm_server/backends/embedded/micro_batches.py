"""A batch of calls, cut into pieces that fit one forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fakevllm_server.algorithms.loss_units import CallShare, Counted, call_shares
from fakevllm_server.backends.base import Call, LossSpec
from fakevllm_server.backends.torch_losses.tokens import Tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right. Per-token tensors are [rows, scored]: one column per position of
    `ids` from `first_scored` on, the last excepted, each about the token that follows it.
    """

    ids: Tensor
    """[rows, tokens]"""
    first_scored: int
    """The first position whose logits anyone wants."""
    mask: Tensor
    """Whether a response token is predicted; what it picks is in the order of `tokens`."""
    tokens: Tokens
    temperature: Tensor
    """[rows, 1]"""

    @property
    def targets(self) -> Tensor:
        return self.ids[:, self.first_scored + 1 :]


def unit_of(call: Call) -> Hashable:
    return id(call) if call.unit is None else call.unit


def shares_of(calls: Sequence[Call], spec: LossSpec) -> dict[int, CallShare]:
    """By the calls' identity: each one's share of the step."""
    counted = [Counted(unit_of(call), call.weight, len(call.response_ids)) for call in calls]
    return dict(zip(map(id, calls), call_shares(counted, spec), strict=True))


def cut(
    calls: Sequence[Call], max_tokens: int, together: Callable[[Call], Hashable] = id
) -> list[list[Call]]:
    """Longest first, at most `max_tokens` padded tokens a piece; a longer call goes alone. Calls
    that are the same `together` stay so.

    Like lengths meet, so little is padding; the dearest piece comes first, so a lack of memory
    shows at once.
    """
    bundles: defaultdict[Hashable, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=num_tokens, reverse=True):
        bundles[together(call)].append(call)
    pieces: list[list[Call]] = []
    for bundle in bundles.values():
        if pieces and num_tokens(pieces[-1][0]) * (len(pieces[-1]) + len(bundle)) <= max_tokens:
            pieces[-1].extend(bundle)
        else:
            pieces.append(bundle)
    return pieces


def num_tokens(call: Call) -> int:
    return len(call.prompt_ids) + len(call.response_ids)


def total_weight(calls: Sequence[Call]) -> float:
    """Of all response tokens: what the loss of the whole batch is divided by."""
    return sum(call.weight * len(call.response_ids) for call in calls)


def collate(calls: Sequence[Call], shares: Sequence[CallShare], device: torch.device) -> MicroBatch:
    longest = max(map(num_tokens, calls))
    first_scored = min(len(call.prompt_ids) for call in calls) - 1
    assert first_scored >= 0, "a call without prompt has no first token to predict from"
    assert all(call.temperature > 0 for call in calls), (
        "greedy calls have no log-probability to train on"
    )
    ids = torch.zeros(len(calls), longest, dtype=torch.long)
    mask = torch.zeros(len(calls), longest - 1 - first_scored, dtype=torch.bool)
    for row, call in enumerate(calls):
        start = len(call.prompt_ids) - 1 - first_scored
        ids[row, : num_tokens(call)] = torch.tensor([*call.prompt_ids, *call.response_ids])
        mask[row, start : start + len(call.response_ids)] = True
    return MicroBatch(
        ids=ids.to(device),
        first_scored=first_scored,
        mask=mask.to(device),
        tokens=Tokens.of(calls, shares, device=device),
        temperature=torch.tensor([call.temperature for call in calls])[:, None].to(device),
    )
