"""Check at start-up that batched decoding computes the same logits as the model without a KV
cache."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode.decoder import Decoder, cache_shape
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
    check decodes two rows of different lengths, of which the second joins the batch one step later.

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
    first, second = (
        [rng.randrange(vocab_size) for _ in range(min(length, max_model_len))] for length in (9, 6)
    )
    cache = KvCache(
        cache_shape(model), max_rows=2, max_length=max_model_len, max_cells=2 * max_model_len
    )
    decoder = Decoder(model, cache, frozenset(), may_fuse=may_fuse)
    worst = 0.0
    _join(decoder, model, first[:-3])
    for step in range(3):
        if step == 1:
            _join(decoder, model, second[:-2])
        logits = decoder.logits().float()
        for index, (row, ids) in enumerate(zip(decoder.rows, (first, second), strict=False)):
            inputs = torch.tensor([row.ids], device=model.device)
            plain = network(input_ids=inputs, use_cache=False).logits[0, -1].float()
            difference = (logits[index] - plain).abs().max() / (plain.abs().max() + 1e-6)
            is_nan = bool(difference != difference)
            worst = float("inf") if is_nan else max(worst, difference.item())
            row.ids.append(ids[len(row.ids)] if len(row.ids) < len(ids) else 0)
    return worst


def _join(decoder: Decoder, model: PreTrainedModel, ids: list[int]) -> None:
    request = DecodeRequest(list(ids), 1, Sampling(), random.Random(0), stream=None)
    prefill = decoder.start_prefill({request.prefix_key: ids[:-1]})
    while not prefill.advance(max_tokens=2):
        pass
    decoder.join([request], [prefill.result()[request.prefix_key]])
