"""The forward pass of a decode iteration and of a prefill, with few calls of torch, for models that
are built like Llama.

For a small model on a CPU, most of the time of an iteration is spent on the overhead of torch's
calls, and on copies. This forward pass needs fewer calls and fewer copies:

* One matrix product computes queries, keys and values. Another one computes the gate and the up
  projection of the MLP.
* Keys and values are read from the KV cache without a copy, even if several query heads share them.
* If several rows (running requests) share a prompt, the prompt's keys and values are read once.
* In the last layer of a prefill, only the values that are needed afterwards are computed.
* The rotary angles come from a table.

The weights stay parameters of the model under their own names. Each weight of a joined matrix is a
view of a part of this matrix. If new weights are copied into the model in place, the forward pass
uses the new weights at once.

The module is for float32 on a CPU, and for CUDA. It has not run on CUDA yet. Models that this
module does not support are decoded with their own forward passes. The check at start-up
(`decoding_check`) compares the chosen forward pass with the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode import shared_attention
from fakevllm_server.backends.embedded.decode.kv_cache import CachedPrefix, KvCache
from fakevllm_server.backends.embedded.weights import adapters_of
from fakevllm_server.backends.torch_forest import autocast

FUSED_MODELS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Model classes of the transformers library whose layers have the form that this module computes:
RMS norms before attention and MLP, rotary positions over whole heads, and a gated MLP."""
POSITION_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary positions whose angles depend on the position alone, and not on the length of the
sequence, so that they can be kept in a table."""
MIN_ANGLES = 256


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer. Matrices are [outputs, inputs]. Matrices with "transposed" in their
    name are [inputs, outputs]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    """Weights of the norms of query heads and key heads, or None if the model has none."""
    out_transposed: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down_transposed: Tensor


class FusedForward:
    """The fused forward pass of a model. Create it with `fused_forward`."""

    def __init__(self, model: PreTrainedModel) -> None:
        network: Any = model
        config: Any = model.config
        self._network: Any = network.model
        self._embedding: Tensor = network.model.embed_tokens.weight
        self._final_norm: Tensor = network.model.norm.weight
        self._head: Tensor = network.lm_head.weight
        self._eps: float = config.rms_norm_eps
        attention = network.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._scaling: float = attention.scaling
        # In inference mode the joined tensors could not be written to when weights are published.
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [self._fuse(layer) for layer in network.model.layers]
        self._cos = self._sin = torch.empty(0)

    def logits(self, ids: Tensor, positions: Tensor, cache: KvCache) -> Tensor:
        """Compute the logits of each row's next token, [rows, vocabulary]. A row is a running
        request. Store the keys and values of the given tokens in the cache. `ids` and `positions`
        are [rows]: the latest token of each row, and its position. Call `begin` of the cache first.
        """
        angles = self._angles(positions, cache.length)
        mask = cache.mask()
        hidden = functional.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, hidden, angles)
            attended = self._attend(index, queries, cache.store(index, keys, values), mask, cache)
            hidden = self._after_attention(layer, hidden, attended)
        return functional.linear(self._norm(hidden, self._final_norm), self._head)

    def prefill(
        self, ids: Tensor, begin: int, known: CachedPrefix, *, num_logits: int = 0
    ) -> Tensor | None:
        """Compute one part of several prompts, and store its keys and values. `ids` is [prompts,
        tokens], the tokens of the part. The part begins at the position `begin` of each prompt.
        `known` has room for the keys and values of all tokens: [layers, prompts, heads, tokens,
        head dim] each. Return the logits after the last `num_logits` tokens of the part, [prompts,
        num_logits, vocabulary]. Return None if `num_logits` is 0. `num_logits` must be 0, 1 or the
        number of tokens."""
        num_prompts, num_tokens = ids.shape
        assert num_logits in (0, 1, num_tokens), "the mask of another number is not made"
        end = begin + num_tokens
        positions = torch.arange(begin, end, device=ids.device).repeat(num_prompts)
        angles = self._angles(positions, end)
        # Without a mask, torch skips the hidden half of the scores. This is right only if no token
        # precedes the part.
        mask = (
            torch.ones(num_tokens, end, dtype=torch.bool, device=ids.device).tril_(begin)
            if begin
            else None
        )
        hidden = functional.embedding(ids.flatten(), self._embedding)
        for index, layer in enumerate(self._layers):
            projected = self._project(layer, hidden, angles)
            queries, keys, values = (
                part.view(num_prompts, num_tokens, -1, self._head_dim).transpose(1, 2)
                for part in projected
            )
            known.keys[index, :, :, begin:end] = keys
            known.values[index, :, :, begin:end] = values
            if layer is self._layers[-1]:
                # Of the last layer's output, only that of the last tokens is read.
                if not num_logits:
                    return None
                queries = queries[:, :, -num_logits:]
                hidden = hidden.view(num_prompts, num_tokens, -1)[:, -num_logits:].flatten(0, 1)
                mask = None if mask is None else mask[-num_logits:]
            attended = functional.scaled_dot_product_attention(
                queries,
                known.keys[index, :, :, :end],
                known.values[index, :, :, :end],
                attn_mask=mask,
                is_causal=mask is None and queries.shape[2] > 1,
                scale=self._scaling,
                enable_gqa=True,
            )
            hidden = self._after_attention(layer, hidden, attended.transpose(1, 2))
        logits = functional.linear(self._norm(hidden, self._final_norm), self._head)
        return logits.view(num_prompts, num_logits, -1)

    def _project(
        self, layer: _Layer, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, [tokens, heads, head dim] each."""
        dim, num_heads, num_kv_heads = self._head_dim, self._num_heads, self._num_kv_heads
        joined = functional.linear(
            self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias
        ).view(len(hidden), -1, dim)
        rotated, values = joined.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.head_norms is not None:
            rotated = functional.rms_norm(rotated, (dim,), None, self._eps)
            for part, weight in zip(
                rotated.split([num_heads, num_kv_heads], dim=1), layer.head_norms, strict=True
            ):
                part.mul_(weight)
        cos, sin = angles
        # The signs of the rotation are in the table of sines.
        rotated = torch.addcmul(rotated * cos, rotated.roll(dim // 2, -1), sin)
        queries, keys = rotated.split([num_heads, num_kv_heads], dim=1)
        return queries, keys, values

    def _attend(
        self,
        index: int,
        queries: Tensor,
        own: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: KvCache,
    ) -> Tensor:
        if cache.shared_rows:
            return shared_attention.attend(
                queries, *own, mask, cache.shared_rows, index, self._scaling
            )
        # Query heads that share a key head are treated as several tokens, so that the key head is
        # read once.
        grouped = queries.reshape(len(queries), self._num_kv_heads, -1, self._head_dim)
        return functional.scaled_dot_product_attention(
            grouped, *own, attn_mask=mask, scale=self._scaling
        )

    def _after_attention(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the output of a layer. `hidden` is the input of the layer, and `attended` is the
        output of its attention heads."""
        hidden = torch.addmm(hidden, attended.reshape(len(hidden), -1), layer.out_transposed)
        gate, up = functional.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(
            2, dim=-1
        )
        return torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down_transposed)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)

    def reserve_angles(self, length: int) -> None:
        """Compute the rotary angles of the positions below `length`, if they are not known yet."""
        if length <= len(self._cos):
            return
        length = max(MIN_ANGLES, 1 << (length - 1).bit_length())
        # The model's own module computes the angles, so that its settings hold.
        positions = torch.arange(length, device=self._embedding.device)
        cos, sin = self._network.rotary_emb(self._embedding, positions[None])
        half = self._head_dim // 2
        self._cos = cos[0]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def _angles(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines for rotary embeddings at the positions, [tokens, 1, head
        dim] each. In the first half of the head dimension, the sines are negated. `length` must be
        larger than the largest position."""
        self.reserve_angles(length)
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        has_head_norms = hasattr(attention, "q_norm")
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_join([one.weight for one in projections]),
            qkv_bias=_join([one.bias for one in projections])
            if attention.q_proj.bias is not None
            else None,
            head_norms=(attention.q_norm.weight, attention.k_norm.weight)
            if has_head_norms
            else None,
            out_transposed=attention.o_proj.weight.t(),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down_transposed=mlp.down_proj.weight.t(),
        )


def fused_forward(model: PreTrainedModel) -> FusedForward | None:
    """Return the fused forward pass of a model. Return None if the model's architecture is not
    supported."""
    return FusedForward(model) if is_fusible(model) else None


def is_fusible(model: PreTrainedModel) -> bool:
    """Return True if the fused forward pass supports the model."""
    config: Any = model.config
    if type(model).__name__ not in FUSED_MODELS or adapters_of(model):
        return False
    dtypes = {model.dtype, autocast.compute_dtype(model)}
    if model.device.type == "cpu":
        if dtypes != {torch.float32}:
            return False
    elif model.device.type != "cuda" or len(dtypes) > 1:
        return False
    # A wrapped forward pass computes differently, for example in another dtype.
    if any("forward" in vars(module) for module in model.modules()):
        return False
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in POSITION_ROPE_TYPES:
        return False
    body: Any = model.get_decoder()
    layer = body.layers[0]
    unbiased: list[nn.Linear] = [
        layer.self_attn.o_proj,
        layer.mlp.gate_proj,
        layer.mlp.up_proj,
        layer.mlp.down_proj,
    ]
    return config.hidden_act == "silu" and all(one.bias is None for one in unbiased)


def _join(parts: list[Tensor]) -> Tensor:
    """Join tensors along their first dimension. Each part becomes a view of the joined tensor.

    If the parts are already adjacent views of one tensor, they are not copied. Another fused
    forward pass of the same model uses this tensor.
    """
    first, size = parts[0], sum(map(len, parts))
    if _are_joined(parts):
        return first.detach().as_strided((size, *first.shape[1:]), first.stride())
    joined = torch.cat([part.detach() for part in parts])
    begin = 0
    for part in parts:
        part.data = joined[begin : begin + len(part)]
        begin += len(part)
    return joined


def _are_joined(parts: list[Tensor]) -> bool:
    """Return True if the tensors are adjacent parts of one tensor."""
    if not all(part.is_contiguous() for part in parts):
        return False
    return all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
        for before, after in pairwise(parts)
    )
