"""A batch of calls, cut into pieces that fit one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fakevllm_server.backends.base import Call


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right. Per-token tensors are [rows, scored]: one column per position of
    `ids` from `first_scored` on, the last excepted, each about the token that follows it.
    """

    ids: Tensor
    """[rows, tokens]"""
    first_scored: int
    """The first position whose logits anyone wants."""
    old_log_prob: Tensor
    """The engine's; 0 outside the mask."""
    mask: Tensor
    """1 where a response token is predicted."""
    weights: Tensor
    """The mask times each call's weight."""
    advantages: Tensor
    """[rows, 1]"""
    temperature: Tensor
    """[rows, 1]"""

    @property
    def targets(self) -> Tensor:
        return self.ids[:, self.first_scored + 1 :]


def cut(calls: Sequence[Call], max_tokens: int) -> list[list[Call]]:
    """Longest first, at most `max_tokens` padded tokens a piece; a longer call goes alone.

    Like lengths meet, so little is padding; the dearest piece comes first, so a lack of memory
    shows at once.
    """
    pieces: list[list[Call]] = []
    for call in sorted(calls, key=num_tokens, reverse=True):
        if pieces and num_tokens(pieces[-1][0]) * (len(pieces[-1]) + 1) <= max_tokens:
            pieces[-1].append(call)
        else:
            pieces.append([call])
    return pieces


def num_tokens(call: Call) -> int:
    return len(call.prompt_ids) + len(call.response_ids)


def total_weight(calls: Sequence[Call]) -> float:
    """Of all response tokens: what the loss of the whole batch is divided by."""
    return sum(call.weight * len(call.response_ids) for call in calls)


def collate(calls: Sequence[Call], device: torch.device) -> MicroBatch:
    longest = max(map(num_tokens, calls))
    first_scored = min(len(call.prompt_ids) for call in calls) - 1
    assert first_scored >= 0, "a call without prompt has no first token to predict from"
    assert all(call.temperature > 0 for call in calls), (
        "greedy calls have no log-probability to train on"
    )
    ids = torch.zeros(len(calls), longest, dtype=torch.long)
    old = torch.zeros(len(calls), longest - 1 - first_scored)
    mask = torch.zeros_like(old)
    for row, call in enumerate(calls):
        start = len(call.prompt_ids) - 1 - first_scored
        scored = slice(start, start + len(call.response_ids))
        ids[row, : num_tokens(call)] = torch.tensor([*call.prompt_ids, *call.response_ids])
        old[row, scored] = torch.tensor(list(call.logprobs))
        mask[row, scored] = 1
    weight = torch.tensor([call.weight for call in calls])[:, None]
    return MicroBatch(
        ids=ids.to(device),
        first_scored=first_scored,
        old_log_prob=old.to(device),
        mask=mask.to(device),
        weights=(mask * weight).to(device),
        advantages=torch.tensor([call.advantage for call in calls])[:, None].to(device),
        temperature=torch.tensor([call.temperature for call in calls])[:, None].to(device),
    )
