"""Check at start-up that batched decoding computes the same logits as the model without a KV
cache."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode.cuda_graphs import GraphMaker
from fakevllm_server.backends.embedded.decode.decoder import (
    MIN_SHARED_TOKENS,
    Decoder,
    cache_shape,
)
from fakevllm_server.backends.embedded.decode.forward_choice import ForwardChoice
from fakevllm_server.backends.embedded.decode.fused_forward import is_fusible
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.sampling import Sampling

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest accepted difference by dtype, relative to the largest logit. Each limit is above the
rounding errors of a deep model, and far below the effect of a wrong position or mask."""


def check_decoding(
    model: PreTrainedModel, max_model_len: int, new_graph: GraphMaker | None = None
) -> ForwardChoice:
    """Check that batched decoding gives the same logits as plain forward passes of the model. The
    check has two cases. In the first case, two rows of different lengths are decoded, and the
    second row joins the batch later. In the second case, two rows that share a prompt are decoded.

    Return the fastest way of decoding that the model and the device support and that gives the
    right logits. There are three ways, the fastest first: the fused forward pass in CUDA graphs,
    the fused forward pass without graphs, and the model's own forward pass. Raises BackendError if
    no way gives the right logits.
    """
    for choice in _candidates(model, new_graph):
        try:
            _check(model, max_model_len, choice)
        except BackendError as error:
            if not choice.is_fused:
                raise BackendError(f"{error}: choose another --model") from error
            print(f"{error}: a slower way is used", file=sys.stderr)
        else:
            return choice
    raise AssertionError("the last candidate is returned or raises")


def _candidates(
    model: PreTrainedModel, new_graph: GraphMaker | None
) -> Generator[ForwardChoice, None, None]:
    if is_fusible(model):
        if new_graph is not None:
            yield ForwardChoice(new_graph=new_graph)
        yield ForwardChoice()
    yield ForwardChoice(is_fused=False)


def _check(model: PreTrainedModel, max_model_len: int, choice: ForwardChoice) -> None:
    """Check one way of decoding, `choice`. Raises BackendError if this way of decoding fails, or
    gives wrong logits."""
    name = str(choice) if choice.is_fused else "the embedded engine"
    try:
        worst = _worst_difference(model, max_model_len, choice)
    # A model that does not fit fails in its own code, with any exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BackendError(f"{name} cannot decode this model ({reason})") from error
    if not worst <= TOLERANCE[model.dtype]:
        raise BackendError(
            f"{name} decodes this model wrongly (logits off by {worst:.1e} of the largest)"
        )


@torch.inference_mode()
def _worst_difference(model: PreTrainedModel, max_model_len: int, choice: ForwardChoice) -> float:
    """Decode with `choice`, one of the ways of decoding. Return the largest difference between the
    decoded logits and the logits of plain forward passes, as a fraction of the largest logit.
    Return infinity if a logit is NaN."""
    network: Any = model
    rng = random.Random(0)
    vocab_size = model.config.get_text_config().vocab_size
    first, second, long = (
        [rng.randrange(vocab_size) for _ in range(max(1, min(length, max_model_len - left)))]
        for length, left in ((6, 5), (4, 3), (MIN_SHARED_TOKENS + 1, 1))
    )
    # Between two changes of the rows are two steps, because the second one replays a graph.
    joining = {0: [first], 2: [second], 4: [long, list(long)]}
    cache = KvCache(
        cache_shape(model),
        max_rows=4,
        max_length=max_model_len,
        max_cells=4 * max_model_len,
        has_static_width=choice.new_graph is not None,
    )
    decoder = Decoder(model, cache, frozenset(), choice)
    worst = 0.0

    def compare(logits: Tensor, ids: list[int]) -> None:
        nonlocal worst
        inputs = torch.tensor([ids], device=model.device)
        plain = network(input_ids=inputs, use_cache=False).logits[0, -1].float()
        difference = (logits.float() - plain).abs().max() / (plain.abs().max() + 1e-6)
        is_nan = bool(difference != difference)
        worst = float("inf") if is_nan else max(worst, difference.item())

    for step in range(6):
        if step in joining:
            prompts = joining[step]
            first_logits = _join(decoder, prompts)
            if first_logits is not None:
                compare(first_logits[0], prompts[0])
        logits = decoder.logits()
        for index, row in enumerate(decoder.rows):
            compare(logits[index], row.ids)
            row.ids.append(rng.randrange(vocab_size))
    return worst


def _join(decoder: Decoder, prompts: list[list[int]]) -> Tensor | None:
    """Prefill `prompts`, which are all equal, and add them to the batch. Return the logits after
    the prompt, [1, vocabulary]. Return None for a prompt of one token, because nothing is prefilled
    then."""
    requests = [DecodeRequest(ids, 1, Sampling(), random.Random(0), stream=None) for ids in prompts]
    key, prefix = requests[0].prefix_key, requests[0].prefix
    if not prefix:
        decoder.join(requests, [])
        return None
    prefill = decoder.start_prefill({key: prefix}, last_id=prompts[0][-1])
    while not prefill.advance(max_tokens=max(2, len(prefix) // 2)):
        pass
    decoder.join(requests, [prefill.result()[key]])
    return prefill.logits
