"""Decode a batch: one forward pass computes the next token of every row (a running request).

The decoder holds the model, the KV cache and the rows. Other modules run the threads, deliver the
tokens, and decide which requests join the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fakevllm_server.backends.embedded.decode.cuda_graphs import GraphedForward
from fakevllm_server.backends.embedded.decode.forward_choice import ForwardChoice
from fakevllm_server.backends.embedded.decode.fused_forward import FusedForward, fused_forward
from fakevllm_server.backends.embedded.decode.kv_cache import (
    CachedPrefix,
    CacheShape,
    KvCache,
    SharedPrefix,
    joined,
)
from fakevllm_server.backends.embedded.decode.logits_processors import (
    LogitsProcessor,
    process_logits,
)
from fakevllm_server.backends.embedded.decode.prefill_cache import PrefillCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.decode.sampler import SamplingRows, sample
from fakevllm_server.types.sampling import Token

MIN_SHARED_TOKENS = 128
"""Rows with the same prompt share the prompt's keys and values only if the prompt has at least this
many tokens. With a shorter prompt, it is faster to read the prompt once per row than to compute
attention in two parts."""


class _RowSettings(NamedTuple):
    """The sampling settings of several requests."""

    sampling: SamplingRows
    processors: list[tuple[int, LogitsProcessor]]
    """Pairs of index and processor, for the requests that have a processor."""


class Decoder:
    """The batch of running requests, with the model and the KV cache. Each request is one row of
    the batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        eos_ids: frozenset[int],
        forward: ForwardChoice = ForwardChoice(),
    ) -> None:
        self.rows: list[DecodeRequest] = []
        self.cache = cache
        self._eos_ids = eos_ids
        self._forward = forward
        self._settings: _RowSettings | None = None
        """Sampling settings of the current rows; None after the rows have changed."""
        self.use_model(model)

    def use_model(self, model: PreTrainedModel) -> None:
        """From now on, decode with another model object. The new object's keys and values must have
        the same shapes as those of the old object."""
        self._model: Any = model
        self._fused = fused_forward(model) if self._forward.is_fused else None
        self._step: FusedForward | GraphedForward | None = self._fused
        new_graph = self._forward.new_graph
        # A graph has fixed shapes, but shared prompts have many different lengths.
        self._can_share = self._fused is not None and new_graph is None
        if self._fused is not None and new_graph is not None:
            self._step = GraphedForward(self._fused, self.cache.max_length, new_graph)

    def start_prefill(
        self,
        prompts: dict[bytes, list[int]],
        known: Sequence[Sequence[CachedPrefix]] = (),
        last_id: int | None = None,
    ) -> Prefill:
        return Prefill(self._model, self._fused, self.cache.shape, prompts, known, last_id)

    def join(self, requests: Sequence[DecodeRequest], parts: Sequence[CachedPrefix]) -> None:
        """Add requests with equal prefixes to the batch, each as a new row.

        The prefix of a request is all its ids (prompt and sampled tokens) except the last id.
        `parts` has the keys and values of the prefix, divided into parts. Rows with the same prefix
        share these keys and values if the forward pass supports sharing and the prefix has at least
        MIN_SHARED_TOKENS tokens.
        """
        num_tokens = sum(part.num_tokens for part in parts)
        assert all(num_tokens == len(one.ids) - 1 for one in requests), "one id is left"
        shared = None
        if self._can_share and num_tokens >= MIN_SHARED_TOKENS:
            key = requests[0].prefix_key
            shared = self.cache.shared_prefix(key)
            if shared is None and len(requests) > 1:
                shared = SharedPrefix(key, joined(parts))
        for request in requests:
            self.cache.add_row(*(parts if shared is None else ()), shared=shared)
            self.rows.append(request)
        self._settings = None

    def advance(self, version: int) -> list[DecodeRequest]:
        """Sample one token for every row, and return the requests of these rows. `version` is the
        weight version to record with the tokens. The caller must remove the rows of finished
        requests afterwards."""
        assert self.rows, "nothing to decode"
        rows = list(self.rows)
        self._settings = self._settings or self._settings_of(rows)
        self._take(rows, self.logits(), self._settings, version)
        return rows

    def sample_first(self, requests: Sequence[DecodeRequest], logits: Tensor, version: int) -> None:
        """Sample the first token of each request. The requests have equal prompts, and are not in
        the batch yet. `logits` are the logits after the prompt's last token, [1, vocabulary]."""
        settings = self._settings_of(requests)
        self._take(requests, logits.expand(len(requests), -1), settings, version)

    def _take(
        self,
        requests: Sequence[DecodeRequest],
        logits: Tensor,
        settings: _RowSettings,
        version: int,
    ) -> None:
        if settings.processors:
            logits = process_logits(logits, settings.processors)
        sampled = sample(logits, settings.sampling, [one.rng.random() for one in requests])
        for request, token_id, logprob, top, allowed in zip(requests, *sampled, strict=True):
            request.take(Token(token_id, logprob, version, top, allowed), self._eos_ids)

    def _settings_of(self, requests: Sequence[DecodeRequest]) -> _RowSettings:
        return _RowSettings(
            SamplingRows.of([one.sampling for one in requests], self.cache.shape.device),
            [
                (index, one.logits_processor)
                for index, one in enumerate(requests)
                if one.logits_processor is not None
            ],
        )

    def logits(self) -> Tensor:
        """Run one forward pass on the last id of each row. Store the keys and values of this id in
        the KV cache. Return the logits of the next tokens, [rows, vocabulary]."""
        positions = self.cache.begin([len(row.ids) - 1 for row in self.rows])
        ids = torch.tensor([row.ids[-1] for row in self.rows], device=positions.device)
        if self._step is not None:
            return self._step.logits(ids, positions, self.cache)
        output = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            attention_mask=self.cache.mask(),
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of `ids` after the first one. The
        log-probabilities of all tokens are computed at once, with the weights and the forward pass
        of the sampler. The batch and its cache do not change."""
        inputs = torch.tensor([ids[:-1]], device=self.cache.shape.device)
        if self._fused is not None:
            known = PrefillCache(self.cache.shape, 1, len(ids) - 1).filled
            logits = self._fused.prefill(inputs, 0, known, num_logits=len(ids) - 1)
            assert logits is not None, "logits were requested"
        else:
            logits = self._model(input_ids=inputs, use_cache=False).logits
        log_probs = logits[0].float().log_softmax(-1)
        following = torch.tensor(ids[1:], device=log_probs.device)
        return log_probs.gather(1, following[:, None])[:, 0].tolist()

    def drop(self, indices: list[int]) -> None:
        for index in sorted(indices, reverse=True):
            self.cache.drop_row(index)
            last = self.rows.pop()
            if index < len(self.rows):
                self.rows[index] = last
            self._settings = None

    def drop_for_memory(self) -> list[DecodeRequest]:
        """Remove rows until the KV cache has memory for one more token in each remaining row. Stop
        when only one row is left. The shortest rows are removed first, because recomputing their
        keys and values is cheapest. Return the requests of the removed rows."""
        dropped: list[DecodeRequest] = []
        while len(self.rows) > 1 and not self.cache.fits(
            len(self.rows), max(len(row.ids) for row in self.rows)
        ):
            index = min(range(len(self.rows)), key=lambda i: len(self.rows[i].ids))
            dropped.append(self.rows[index])
            self.drop([index])
        return dropped

    def drop_all(self) -> list[DecodeRequest]:
        rows = list(self.rows)
        self.drop(list(range(len(rows))))
        return rows


class Prefill:
    """The computation of the keys and values of several prompts (prefill). It runs in parts, so
    that running requests get tokens in between. If the keys and values of the first tokens are
    known already, `known` contains them for each prompt, divided into parts. The number of these
    tokens must be the same for all prompts.

    In this class, a prompt does not include the last token of its request. To sample a token, the
    request needs the logits after this last token. If there is only one prompt, pass its last token
    as `last_id`. The prefill then also computes the logits after `last_id`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fused: FusedForward | None,
        shape: CacheShape,
        prompts: dict[bytes, list[int]],
        known: Sequence[Sequence[CachedPrefix]] = (),
        last_id: int | None = None,
    ) -> None:
        assert last_id is None or len(prompts) == 1, "prompts are padded on the right"
        self._model: Any = model
        self._fused = fused
        self._prompts = prompts
        self.last_id = last_id
        self.logits: Tensor | None = None
        """After the last part: the logits after `last_id`, [1, vocabulary]."""
        last = [] if last_id is None else [last_id]
        longest = max(map(len, prompts.values()))
        # Padding is on the right, so that under the causal mask no real token attends to it.
        rows = [prompt + last + [0] * (longest - len(prompt)) for prompt in prompts.values()]
        self._ids = torch.tensor(rows, device=shape.device)
        self._cache = PrefillCache(shape, len(rows), self._ids.shape[1])
        for row, parts in enumerate(known):
            self._cache.fill(row, parts)

    def advance(self, max_tokens: int) -> bool:
        """Run the next part of the prefill. The part has at most `max_tokens` tokens including
        padding, but at least one token of each prompt. Return True after the last part."""
        begin = self._cache.length
        piece = self._ids[:, begin : begin + max(1, max_tokens // len(self._ids))]
        end = begin + piece.shape[1]
        is_last = end == self._ids.shape[1]
        needs_logits = is_last and self.last_id is not None
        if self._fused is not None:
            logits = self._fused.prefill(
                piece, begin, self._cache.filled, num_logits=int(needs_logits)
            )
        else:
            # The logits of one position are the minimum that can be requested.
            output = self._model(
                input_ids=piece, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            logits = output.logits
        if needs_logits:
            assert logits is not None, "logits were requested"
            self.logits = logits[:, -1]
        self._cache.length = end
        return is_last

    def result(self) -> dict[bytes, CachedPrefix]:
        """Return a copy of the keys and values of each prompt. The keys and values of `last_id`,
        the last token of the request, are left out."""
        return {
            key: self._cache.prefix(row, len(prompt))
            for row, (key, prompt) in enumerate(self._prompts.items())
        }

    def with_last(self) -> CachedPrefix:
        """Return the keys and values of the prompt, followed by those of `last_id`, the last token
        of the request. Call this method only if there is one prompt. The returned tensors are views
        of the prefill's own tensors."""
        return self._cache.row(0)


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return the shape of the keys and values in a model's KV cache. The shape is measured with a
    forward pass, because model configs have different names for the sizes. Raises ValueError if the
    layers have different shapes."""
    cache = DynamicCache()
    network: Any = model
    with torch.inference_mode():
        network(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
    layers: list[Any] = cache.layers
    sizes = {(layer.keys.shape, layer.values.shape) for layer in layers if layer.keys is not None}
    if len(sizes) != 1:
        raise ValueError("its layers keep keys and values of different sizes")
    (key_size, value_size), keys = sizes.pop(), layers[0].keys
    return CacheShape(len(layers), key_size[1], key_size[3], value_size[3], keys.dtype, keys.device)
