"""Sample one token from the logits of each row (a running request).

Temperature is applied first, then min_p, top_k and top_p, in vLLM's order. The reported
log-probability of a token belongs to the distribution from which the token was sampled. For a
greedy row (temperature 0), the log-probability is computed without temperature, min_p, top_k and
top_p. One uniform random number of the row chooses the row's token. Therefore the token depends
only on the row's own logits and random number generator.
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
"""Log-probability that is reported for tokens that cannot be sampled, because JSON has no -inf.
vLLM reports the same number."""
MOST_LOGIT = 1e30
LEAST_TOP_P = 1e-6
"""Lower bound of top_p. At 0 not even the likeliest token would remain."""


class SampledTokens(NamedTuple):
    """The tokens that one decode step has sampled. Each list has one entry per row, which is one
    running request."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    """The likeliest tokens of each row as (id, log-probability), best first. Each row has as many
    tokens as its request asked for."""
    allowed: list[bytes | None]
    """The packed set (`types/token_masks.py`) from which the row's token was chosen. The entry is
    None if the token was chosen from the whole vocabulary, or if the row did not request the
    set."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling settings of a batch of rows (running requests). Most settings are tensors,
    [rows] or [rows, 1], or None if the setting has no effect on any row."""

    temperature: Tensor | None
    """None if every row has temperature 1.0 or is greedy."""
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    num_tops: list[int]
    reporting_allowed: list[int]
    """Indices of the rows that request the set from which their token is chosen."""

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
            reporting_allowed=[at for at, row in enumerate(rows) if row.reports_allowed],
        )


def sample(logits: Tensor, rows: SamplingRows, uniforms: Sequence[float]) -> SampledTokens:
    """Sample one token per row, and return the tokens with their log-probabilities. `logits` is
    [rows, vocabulary] of any float dtype. `uniforms` has one random number in [0, 1) per row."""
    logits = logits.float()
    processed = logits if rows.temperature is None else logits / rows.temperature
    # Broken weights give NaN. Sampling from NaN would raise and end the engine for all requests.
    processed = processed.nan_to_num(nan=LEAST_LOGPROB, posinf=MOST_LOGIT, neginf=-torch.inf)
    processed = _truncated(processed, rows)
    logprobs = torch.log_softmax(processed, dim=-1)
    ids = _draw(logprobs.exp(), uniforms)
    if rows.greedy is not None:
        ids = torch.where(rows.greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    tops = _tops(logprobs, rows.num_tops)
    return SampledTokens(
        ids.tolist(), chosen.tolist(), tops, _allowed(logprobs, rows.reporting_allowed)
    )


def _draw(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token id per row, and return the ids, [rows]. `probabilities` is [rows, vocabulary].
    The random number of a row is looked up in the row's cumulative distribution. A token of
    probability 0 is never drawn."""
    # float32 sums over a large vocabulary lose the tail, but MPS has no float64.
    exact = torch.float32 if probabilities.device.type == "mps" else torch.float64
    cumulative = probabilities.to(exact).cumsum(-1)
    total = cumulative[:, -1:]
    point = torch.tensor(uniforms, dtype=exact, device=probabilities.device)[:, None] * total
    below = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True)[:, 0]


def _truncated(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the logits, [rows, vocabulary], with -inf for each token that min_p, top_k or top_p
    excludes."""
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
        # `before` is 0 for the likeliest token, so one token always remains.
        ordered = ordered.masked_fill((before >= rows.top_p) & (rows.top_p < 1), float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _allowed(logprobs: Tensor, reporting: list[int]) -> list[bytes | None]:
    """Return one entry for each row. For a row in `reporting`, the entry is the set of tokens that
    could be sampled, packed into bytes. The entry is None if every token could be sampled. For all
    other rows, the entry is None.

    A token could not be sampled if its log-probability is -inf. A grammar, allowed ids, top-p or
    another setting may have excluded it.
    """
    sets: list[bytes | None] = [None] * len(logprobs)
    if not reporting:
        return sets
    kept = (logprobs[reporting] > float("-inf")).cpu().numpy()
    for at, row in zip(reporting, kept, strict=True):
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
