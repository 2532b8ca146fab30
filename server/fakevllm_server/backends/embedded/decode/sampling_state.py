"""The sampler's state on the engine thread. It consists of the weights with their version, the
running requests, the cached prefixes and the waiting requests.

One decode iteration samples one token for every running request. A publish replaces the sampling
weights. It first waits until the running requests have finished, or until a time limit has passed.
Waiting requests start only after the weights are replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial

from transformers import PreTrainedModel

from fakevllm_server.backends.embedded.decode.decoder import Decoder, Prefill
from fakevllm_server.backends.embedded.decode.forward_choice import ForwardChoice
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.prefix_cache import PrefixCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.decode.scheduler import Scheduler
from fakevllm_server.backends.embedded.lora_model import adapter_view, needs_adapter_view
from fakevllm_server.backends.embedded.weights import MergedWeights, adapters_of, copy_weights
from fakevllm_server.types.backend import BackendError

MAX_PREFILL_TOKENS = 2048
"""Maximum number of padded tokens per forward pass of a prefill. This number limits the memory of
the pass, and the time that running requests wait for the pass."""
BUSY_PREFILL_TOKENS = 256
"""Maximum number of padded tokens per forward pass of a prefill while requests are running. Running
requests get one token between two passes. On a CPU, a pass of 2048 tokens takes seconds for a model
of 25 million parameters."""
MAX_PREFIX_TOKENS = 16384
"""Default maximum number of tokens in the prefix cache."""


class SamplingState:
    """The state of the sampler. Its methods run decode iterations and replace the weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        eos_ids: frozenset[int],
        prefixes: PrefixCache | None = None,
        forward: ForwardChoice = ForwardChoice(),
    ) -> None:
        self.model = model
        self.version = 0
        self.decoder = Decoder(model, cache, eos_ids, forward)
        self.scheduler = Scheduler(cache.max_rows, MAX_PREFILL_TOKENS)
        self.prefixes = prefixes or PrefixCache(MAX_PREFIX_TOKENS)
        self._prefill: Prefill | None = None
        self._is_admitting = True

    @property
    def rows_running(self) -> bool:
        return bool(self.decoder.rows)

    @property
    def has_work(self) -> bool:
        return self.rows_running or self._prefill is not None or bool(self.scheduler.waiting)

    def run_iteration(self) -> list[DecodeRequest]:
        """Run one decode iteration, and return the requests that got a token."""
        self._remove_ended()
        self.scheduler.put_back(self.decoder.drop_for_memory())
        has_rows = self.rows_running
        begun: list[DecodeRequest] = []
        if self._is_admitting:
            self._admit()
            begun = self._advance_prefill()
        if begun and not has_rows:
            return begun  # their first token is delivered before the next one is computed
        advanced = self.decoder.advance(self.version) if self.decoder.rows else []
        self._remove_ended()
        return [*(request for request in begun if request.finished), *advanced]

    def _remove_ended(self) -> None:
        """Remove the rows whose requests have finished or were cancelled. Keep the keys and values
        of these rows for the next turns of their sessions."""
        rows = self.decoder.rows
        ended = [at for at, row in enumerate(rows) if row.finished or row.cancelled]
        for at in ended:
            self.prefixes.put_answered(rows[at].prefix, partial(self.decoder.cache.copy_of, at))
        self.decoder.drop(ended)

    def publish(
        self, load: Callable[[], PreTrainedModel], version: int, drain_bound_s: float
    ) -> Generator[None, None, None]:
        """Replace the sampling weights by those of the model that `load()` returns. `version` is
        the version of these weights. If the new model's weight names or shapes differ from those of
        the current model, no weight changes, and BackendError is raised. Usually, the weights of
        the new model are copied, with LoRA adapters merged. If merging would round the adapters,
        the sampler uses a view instead: a second model object that has copies of the adapters and
        shares the base weights. In both cases, the caller may train the new model further.

        This method is a generator. Between two steps of the generator, the caller runs decode
        iterations, so that running requests can finish. Requests that have not finished after
        `drain_bound_s` seconds are interrupted, and continue with the new weights. New requests
        wait until the weights are replaced. No request is refused.
        """
        source = load()
        check_same_architecture(source, self.model)
        self._is_admitting = False
        try:
            deadline = time.monotonic() + drain_bound_s
            while self.rows_running and time.monotonic() < deadline:
                yield
            self._prefill = None
            self.scheduler.abandon_prefill()
            self.scheduler.put_back(self.decoder.drop_all())
            self._take(source)
            self.prefixes.clear()
            self.version = version
        finally:
            self._is_admitting = True

    def _take(self, source: PreTrainedModel) -> None:
        """Use the weights of the model `source` for sampling, in one of three ways:

        * If merging the LoRA adapters of `source` would round the adapters, sample from a view of
          `source` (a second model object that shares the base weights).
        * Otherwise, if the current model has no adapters, copy the weights of `source` into the
          current model, with adapters merged. No second model then stays in memory.
        * Otherwise the current model is itself a view, and `source` replaces it.
        """
        if needs_adapter_view(source):
            source = adapter_view(source)
        elif not adapters_of(self.model):
            return copy_weights(source, self.model)
        self.model = source
        self.decoder.use_model(source)

    def all_requests(self) -> list[DecodeRequest]:
        prefilling = [
            request for waiting in self.scheduler.prefilling.values() for request in waiting
        ]
        return [*self.decoder.rows, *prefilling, *self.scheduler.waiting]

    def _admit(self) -> None:
        if not self.scheduler.waiting:
            return
        longest = max((len(row.ids) + 1 for row in self.decoder.rows), default=0)
        output = self.scheduler.schedule(
            len(self.decoder.rows),
            self.prefixes.num_cached,
            lambda rows, length: self.decoder.cache.fits(rows, max(length, longest)),
        )
        by_key: dict[bytes, list[DecodeRequest]] = {}
        for request in output.joining:
            by_key.setdefault(request.prefix_key, []).append(request)
        for requests in by_key.values():
            self.decoder.join(requests, self.prefixes.get(requests[0].prefix))
        if output.prefill:
            known = [self.prefixes.get(ids) for ids in output.prefill.values()]
            self._prefill = self.decoder.start_prefill(
                output.prefill, known, self._last_id(output.prefill)
            )

    def _last_id(self, prompts: dict[bytes, list[int]]) -> int | None:
        """Return the last token id of the request, if the prefill has only one prompt. If this id
        is passed to the prefill, the prefill also computes the logits from which the request's
        first token is sampled. That saves a forward pass.

        In the mode for reproducible runs (`whole_prompts` of the prefix cache), always return None,
        so that equal prompts have equal logits. The logits of a prefill and of a decode iteration
        differ in their last bits, and a cached prompt has no prefill. Therefore all first tokens
        are sampled in decode iterations in this mode.
        """
        if len(prompts) > 1 or self.prefixes.whole_prompts:
            return None
        (requests,) = (self.scheduler.prefilling[key] for key in prompts)
        return requests[0].ids[-1]

    def _advance_prefill(self) -> list[DecodeRequest]:
        """Run the next part of the prefill. After the last part, move the requests that wait for
        this prefill to the running requests. Return the requests whose first token was sampled from
        the logits of the prefill."""
        if self._prefill is None:
            return []
        max_tokens = BUSY_PREFILL_TOKENS if self.rows_running else MAX_PREFILL_TOKENS
        if not self._prefill.advance(min(max_tokens, MAX_PREFILL_TOKENS)):
            return []
        prefill, self._prefill = self._prefill, None
        prefixes = prefill.result()
        begun: list[DecodeRequest] = []
        for key, requests in self.scheduler.prefilled().items():
            prefix = prefixes[key]
            self.prefixes.put(requests[0].prefix, prefix)
            waiting = [request for request in requests if not request.cancelled]
            if prefill.logits is not None:
                # Prompts that differ only in their last id have the same prefix.
                begun = [request for request in waiting if request.ids[-1] == prefill.last_id]
                waiting = [request for request in waiting if request.ids[-1] != prefill.last_id]
                self._begin(begun, prefill)
            if waiting:
                self.decoder.join(waiting, [prefix])
        return begun

    def _begin(self, requests: list[DecodeRequest], prefill: Prefill) -> None:
        """Sample the first token of `requests`, from the logits that their prefill has computed.
        Requests that do not end with this token join the running requests."""
        if not requests:
            return
        assert prefill.logits is not None, "the last part has run"
        self.decoder.sample_first(requests, prefill.logits, self.version)
        going_on = [request for request in requests if not request.finished]
        if going_on:
            self.decoder.join(going_on, [prefill.with_last()])


def check_same_architecture(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Check that two models have the same weight names and shapes. Raises BackendError if they
    differ."""
    if MergedWeights(source).shapes != MergedWeights(target).shapes:
        raise BackendError("the weights are of another architecture than the model being served")
