"""From logits to tokens, for all rows at once.

Temperature, then min_p, then top_k, then top_p, as vLLM does. The log-probability returned is that
of the distribution sampled from; for a greedy row, that of the raw logits. One uniform number per
row decides, so a row's token depends on its own generator and logits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from fakevllm_server.types.sampling import Sampling, effective_temperature
from fakevllm_server.types.token_masks import packed

LEAST_LOGPROB = -9999.0
"""vLLM prints this for tokens that cannot be sampled; JSON has no -inf."""
MOST_LOGIT = 1e30
LEAST_TOP_P = 1e-6
"""At 0 not even the likeliest token would remain."""


class SampledTokens(NamedTuple):
    """By row."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    """The likeliest (id, logprob), best first, as many as the row asked for."""
    allowed: list[bytes | None]
    """The packed set (allowed.py) each was chosen from; None for all of the vocabulary, and where
    the row did not ask."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of the rows of a batch as tensors: [rows] or [rows, 1]."""

    temperature: Tensor | None
    """None where all rows are 1.0 or greedy."""
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    num_tops: list[int]
    telling: list[int]
    """Rows that ask what they were chosen from."""

    @staticmethod
    def of(rows: Sequence[Sampling], device: torch.device) -> SamplingRows:
        def column(values: list[float], neutral: float) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        greedy = [row.temperature == 0 for row in rows]
        drawn = [Sampling() if row.temperature == 0 else row for row in rows]
        return SamplingRows(
            temperature=column([effective_temperature(row.temperature) for row in drawn], 1.0),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column([max(row.top_k, 0) for row in drawn], 0.0),
            top_p=column([max(row.top_p, LEAST_TOP_P) for row in drawn], 1.0),
            min_p=column([min(row.min_p, 1.0) for row in drawn], 0.0),
            num_tops=[max(row.top_logprobs, 0) for row in rows],
            telling=[at for at, row in enumerate(rows) if row.reports_allowed],
        )


def sample(logits: Tensor, rows: SamplingRows, uniforms: Sequence[float]) -> SampledTokens:
    """`logits` [rows, vocabulary], any float type; `uniforms` in [0, 1), one per row."""
    logits = logits.float()
    processed = logits if rows.temperature is None else logits / rows.temperature
    # A NaN here would end the engine for everybody; numbers that broken weights make are no reason.
    processed = processed.nan_to_num(nan=LEAST_LOGPROB, posinf=MOST_LOGIT, neginf=-torch.inf)
    processed = _truncated(processed, rows)
    logprobs = torch.log_softmax(processed, dim=-1)
    ids = _draw(logprobs.exp(), uniforms)
    if rows.greedy is not None:
        ids = torch.where(rows.greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    tops = _tops(logprobs, rows.num_tops)
    return SampledTokens(ids.tolist(), chosen.tolist(), tops, _allowed(logprobs, rows.telling))


def _draw(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Inverse of the cumulative distribution. A token of probability 0 is never drawn."""
    # float32 sums over a large vocabulary lose the tail; MPS has nothing better.
    exact = torch.float32 if probabilities.device.type == "mps" else torch.float64
    cumulative = probabilities.to(exact).cumsum(-1)
    total = cumulative[:, -1:]
    point = torch.tensor(uniforms, dtype=exact, device=probabilities.device)[:, None] * total
    below = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True)[:, 0]


def _truncated(logits: Tensor, rows: SamplingRows) -> Tensor:
    """-inf where min_p, top_k or top_p forbid a token."""
    if rows.min_p is not None:
        probabilities = torch.softmax(logits, dim=-1)
        floor = rows.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, float("-inf"))
    if rows.top_k is None and rows.top_p is None:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        rank = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill((rank >= rows.top_k) & (rows.top_k > 0), float("-inf"))
    if rows.top_p is not None:
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        # `before` of the likeliest token is 0, so one token always remains.
        ordered = ordered.masked_fill((before >= rows.top_p) & (rows.top_p < 1), float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _allowed(logprobs: Tensor, telling: list[int]) -> list[bytes | None]:
    """By row. Whatever cut it (grammar, ids, top-p and the rest), what is left has a logprob."""
    sets: list[bytes | None] = [None] * len(logprobs)
    if not telling:
        return sets
    kept = (logprobs[telling] > float("-inf")).cpu().numpy()
    for at, row in zip(telling, kept, strict=True):
        if not row.all():
            sets[at] = packed(numpy.packbits(row, bitorder="little").tobytes())
    return sets


def _tops(logprobs: Tensor, num_tops: list[int]) -> list[list[tuple[int, float]]]:
    most = min(max(num_tops), logprobs.shape[-1])
    if most == 0:
        return [[] for _ in num_tops]
    values, ids = logprobs.topk(most, dim=-1)
    listed = zip(ids.tolist(), values.clamp(min=LEAST_LOGPROB).tolist(), num_tops, strict=True)
    return [
        list(zip(row_ids, row_values, strict=True))[:count] for row_ids, row_values, count in listed
    ]
