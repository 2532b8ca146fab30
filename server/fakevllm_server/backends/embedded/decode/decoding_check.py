"""Check at start-up that batched decoding computes the same logits as the model without a KV
cache."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode.decoder import (
    MIN_SHARED_TOKENS,
    Decoder,
    cache_shape,
)
from fakevllm_server.backends.embedded.decode.fused_forward import is_fusible
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.sampling import Sampling

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest accepted difference by dtype, relative to the largest logit. It is above the rounding of
a deep model, and far below the effect of a wrong position or mask."""


def check_decoding(model: PreTrainedModel, max_model_len: int) -> bool:
    """Check that batched decoding gives the same logits as plain forward passes of the model. The
    check decodes two rows of different lengths, of which the second joins the batch one step later,
    and then two rows that share a prompt.

    Return whether the fused forward pass may be used. If only this pass fails or gives other
    logits, the model is decoded with its own forward pass. Raises BackendError if that is wrong
    too.
    """
    if is_fusible(model):
        try:
            _check(model, max_model_len, "the fused forward pass", may_fuse=True)
        except BackendError as error:
            print(f"{error}: its own forward pass is used, which is slower", file=sys.stderr)
        else:
            return True
    try:
        _check(model, max_model_len, "the embedded engine", may_fuse=False)
    except BackendError as error:
        raise BackendError(f"{error}: choose another --model") from error
    return False


def _check(model: PreTrainedModel, max_model_len: int, name: str, *, may_fuse: bool) -> None:
    """Raise BackendError if decoding with or without the fused forward pass fails or is wrong.
    `name` says in the message what is checked."""
    try:
        worst = _worst_difference(model, max_model_len, may_fuse=may_fuse)
    # A model that does not fit fails in its own code, with any exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BackendError(f"{name} cannot decode this model ({reason})") from error
    if not worst <= TOLERANCE[model.dtype]:
        raise BackendError(
            f"{name} decodes this model wrongly (logits off by {worst:.1e} of the largest)"
        )


@torch.inference_mode()
def _worst_difference(model: PreTrainedModel, max_model_len: int, *, may_fuse: bool) -> float:
    """Return the largest difference between the logits of batched decoding and of plain forward
    passes, as a fraction of the largest logit. Return infinity if a logit is NaN."""
    network: Any = model
    rng = random.Random(0)
    vocab_size = model.config.get_text_config().vocab_size
    first, second, long = (
        [rng.randrange(vocab_size) for _ in range(min(length, max_model_len - left))]
        for length, left in ((6, 3), (4, 2), (MIN_SHARED_TOKENS + 1, 1))
    )
    joining = {0: [first], 1: [second], 2: [long, list(long)]}
    cache = KvCache(
        cache_shape(model), max_rows=4, max_length=max_model_len, max_cells=4 * max_model_len
    )
    decoder = Decoder(model, cache, frozenset(), may_fuse=may_fuse)
    worst = 0.0
    for step in range(4):
        if step in joining:
            _join(decoder, joining[step])
        logits = decoder.logits().float()
        for index, row in enumerate(decoder.rows):
            inputs = torch.tensor([row.ids], device=model.device)
            plain = network(input_ids=inputs, use_cache=False).logits[0, -1].float()
            difference = (logits[index] - plain).abs().max() / (plain.abs().max() + 1e-6)
            is_nan = bool(difference != difference)
            worst = float("inf") if is_nan else max(worst, difference.item())
            row.ids.append(rng.randrange(vocab_size))
    return worst


def _join(decoder: Decoder, prompts: list[list[int]]) -> None:
    """Prefill equal prompts, and add them to the batch."""
    requests = [DecodeRequest(ids, 1, Sampling(), random.Random(0), stream=None) for ids in prompts]
    key, prefix = requests[0].prefix_key, requests[0].prefix
    if not prefix:
        decoder.join(requests, [])
        return
    prefill = decoder.start_prefill({key: prefix})
    while not prefill.advance(max_tokens=max(2, len(prefix) // 2)):
        pass
    decoder.join(requests, [prefill.result()[key]])
