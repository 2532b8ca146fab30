"""The asyncio side of the embedded engine, which samples and trains one model on one torch thread.

The asyncio side passes requests to this thread, called the engine thread, and waits for results.
Requests are checked and rendered on the threads of `backends/http/preparation.py`. Sampling and
training run on the engine thread.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import bad_request, unavailable, unknown_model
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest, allowed_new_tokens
from fakevllm_server.backends.embedded.decode.chat_renderer import ChatRenderer
from fakevllm_server.backends.embedded.decode.cuda_graphs import graph_maker
from fakevllm_server.backends.embedded.decode.decoder import cache_shape
from fakevllm_server.backends.embedded.decode.decoding_check import check_decoding
from fakevllm_server.backends.embedded.decode.grammar import GrammarCompiler
from fakevllm_server.backends.embedded.decode.grouped_attention import use_grouped_attention
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache
from fakevllm_server.backends.embedded.decode.logits_processors import (
    LogitsProcessor,
    needs_logits_processor,
)
from fakevllm_server.backends.embedded.decode.prefix_cache import PrefixCache
from fakevllm_server.backends.embedded.decode.request import DecodeRequest, TokenStream
from fakevllm_server.backends.embedded.decode.sampling_state import (
    SamplingState,
    check_same_architecture,
)
from fakevllm_server.backends.embedded.decode.thread_choice import measured_threads
from fakevllm_server.backends.embedded.decode.vocabulary import (
    bad_word_ids,
    check_ids,
    longest_token_bytes,
)
from fakevllm_server.backends.embedded.device_and_dtype import resolve_device, resolve_dtype
from fakevllm_server.backends.embedded.engine_thread import EngineThread
from fakevllm_server.backends.embedded.model_folder import load_weights, open_model_folder
from fakevllm_server.backends.embedded.train import checkpoint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.http.policies import PolicyNames, PolicyView
from fakevllm_server.types.backend import (
    BackendError,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
    TokenEngine,
)
from fakevllm_server.types.known_prompt import KNOWN_PROMPT, MAX_TOKENS, ProbeReply
from fakevllm_server.types.sampling import Sampling, Token

Result = TypeVar("Result")

MAX_WAITING = 4096
"""Maximum number of waiting requests. The clients of one engine usually have far fewer open
requests. Further requests get status 503. Without a maximum, the queue could become so long that
every request in it times out."""
CACHE_MEMORY_SHARE = 0.15
"""Maximum share of the device's memory for the KV cache. In addition, the trainer needs four times
the memory of the weights."""
PREFIX_MEMORY_SHARE = 0.04
"""Share of the device's memory for the prefix cache, if its size is not configured."""
POLICY_MEMORY_SHARE = 1 / 8
"""Memory for the KV cache of a further policy (weights beside the trained weights), divided by the
memory for the KV cache of the trained weights. A further policy answers fewer requests than the
trained weights."""
DRAIN_BOUND_S = 5.0
"""Seconds that a publish waits for running requests."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: Path
    served_model_name: str
    seed: int = 0
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and completion together; None for the model's own
    maximum."""
    max_num_seqs: int = 64
    """Maximum number of requests that are decoded at a time. Further requests wait."""
    device: str = "auto"
    dtype: str = "auto"
    torch_threads: int | None = 1
    """Number of torch's threads; None to measure at start-up which number is fastest. In lockstep
    (reproducible runs), None means 1. Two threads on two busy cores are far slower than one,
    because OpenMP waits at every barrier."""
    prefix_cache_mib: int | None = None
    """Maximum size of the prefix cache in MiB. 0 turns the cache off. None means the share
    PREFIX_MEMORY_SHARE of the device's memory."""
    drain_bound_s: float = DRAIN_BOUND_S
    lockstep: bool = False
    """Whether requests are decoded one at a time, so that results are reproducible. In a batch, the
    rounding of a row's sums depends on the other rows."""


class EmbeddedEngine:
    """The embedded engine, which samples and trains one model on one torch thread. The class
    implements the interfaces TokenEngine (sampling) and TrainEngine (training). The constructor
    raises BackendError if the engine does not support the model."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.torch_threads or 1)
        torch.manual_seed(config.seed)
        self._config = config
        self._folder = open_model_folder(config.model, config.max_model_len)
        self._device = resolve_device(config.device)
        if config.lockstep and self._device.type != "cpu":
            raise BackendError(
                f"lockstep is for the CPU, because sums on {self._device.type} are not "
                "reproducible: give --engine-arg=--device=cpu, or take job.lockstep out"
            )
        self._dtype = resolve_dtype(config.dtype, self._device)
        model = self._folder.load_weights(self._dtype, self._device)
        use_grouped_attention(model)
        self._forward = check_decoding(model, self._folder.max_model_len, graph_maker(self._device))
        self.model_name = config.served_model_name
        self.max_model_len = self._folder.max_model_len
        self.default_sampling: dict[str, Any] = self._folder.default_sampling
        self.eos_ids = self._folder.eos_ids
        self.reports_allowed = True
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._tokenizer: Any = self._folder.tokenizer
        self._grammars = GrammarCompiler(self._tokenizer, self._vocab_size, self.eos_ids)
        self.max_prompt_bytes = self.max_model_len * longest_token_bytes(self._tokenizer)
        self._renderer = ChatRenderer(
            self._tokenizer, self.model_name, self.max_model_len, self.max_prompt_bytes
        )
        self._rng = random.Random(config.seed)
        self._cache_shape = cache_shape(model)
        self._state = self._sampling_state(model)
        self.names = PolicyNames(self.model_name)
        self._policies: dict[str, SamplingState] = {}
        """The sampling states of the further policies (weights beside the trained weights), by
        policy name."""
        self._trainer: PolicyTrainer | None = None
        num_threads = self._num_threads(model)
        print(
            f"decoding by {self._forward}, in {self._dtype} on {self._device}, with attention "
            f"{model.config._attn_implementation} and {num_threads} torch threads",
            file=sys.stderr,
        )
        self._thread = EngineThread(self._state, num_threads)
        self._thread.start()

    def _sampling_state(self, model: PreTrainedModel, memory_share: float = 1.0) -> SamplingState:
        """Return a new sampling state for the model `model`, with its own KV cache. `memory_share`
        is the share of the memory for keys and values that this state may use."""
        config, shape = self._config, self._cache_shape
        max_rows = 1 if config.lockstep else config.max_num_seqs
        memory = _device_memory(self._device) * memory_share
        max_cells = int(memory * CACHE_MEMORY_SHARE) // shape.bytes_per_position
        cache = KvCache(
            shape,
            max_rows,
            self.max_model_len,
            max_cells,
            has_static_width=self._forward.new_graph is not None,
        )
        prefix_bytes = (
            int(memory * PREFIX_MEMORY_SHARE)
            if config.prefix_cache_mib is None
            else int((config.prefix_cache_mib << 20) * memory_share)
        )
        # In lockstep, results must not depend on the order in which requests with a common prefix
        # arrive.
        prefixes = PrefixCache(
            prefix_bytes // shape.bytes_per_position, whole_prompts=config.lockstep
        )
        return SamplingState(model, cache, self.eos_ids, prefixes, self._forward)

    def _num_threads(self, model: PreTrainedModel) -> int:
        number = self._config.torch_threads
        if number is None:
            number = 1 if self._config.lockstep else measured_threads(model, self.max_model_len)
        return number

    def close(self) -> None:
        self._thread.close()

    # TokenEngine

    def render(self, request: ChatRequest) -> list[int]:
        return self._renderer.render(request)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A lone surrogate is valid in JSON, but cannot be encoded as UTF-8.
        clean = text.encode("utf-8", errors="replace").decode()
        return self._tokenizer.encode(clean, add_special_tokens=add_special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return self._tokenizer.convert_ids_to_tokens(list(ids))

    @property
    def num_waiting(self) -> int:
        return len(self._state.scheduler.waiting)

    @property
    def num_queried_tokens(self) -> int:
        return self._state.prefixes.num_queried_tokens

    @property
    def num_reused_tokens(self) -> int:
        return self._state.prefixes.num_reused_tokens

    def check(self, sampling: Sampling) -> None:
        check_ids(sampling, self._vocab_size)
        if sampling.grammar is not None:
            self._grammars.check(sampling.grammar)

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        return self._generate(prompt_ids, sampling, None)

    async def _generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, policy: str | None
    ) -> AsyncGenerator[list[Token]]:
        request = self._decode_request(list(prompt_ids), sampling, policy)
        if needs_logits_processor(sampling):
            request.logits_processor = await self._logits_processor(prompt_ids, sampling)
        stream = request.stream = TokenStream()
        self._thread.submit(request, policy)
        try:
            is_last = False
            while not is_last:
                tokens, is_last = await stream.get()
                yield tokens
        finally:
            request.cancelled = True

    def _decode_request(
        self, ids: list[int], sampling: Sampling, policy: str | None
    ) -> DecodeRequest:
        if not ids or min(ids) < 0 or max(ids) >= self._vocab_size:
            raise bad_request(
                "The prompt must hold at least one token, and only ids of the vocabulary."
            )
        limit = allowed_new_tokens(
            len(ids), min(sampling.max_tokens, self.max_model_len), self.max_model_len
        )
        state = self._state if policy is None else self._policies.get(policy)
        if state is None:
            raise unknown_model(policy or "", self.model_name)
        if len(state.scheduler.waiting) >= MAX_WAITING:
            raise unavailable("Too many requests are waiting.", OutageReason.ENGINE_BUSY)
        rng = self._rng if sampling.seed is None else random.Random(sampling.seed)
        return DecodeRequest(ids, limit, sampling, rng, stream=None)

    async def probe(self) -> ProbeReply:
        ids = self.encode(KNOWN_PROMPT, add_special_tokens=True)
        ids = ids[: min(MAX_TOKENS, self.max_model_len)]
        log_probs = await self._run_once(lambda: self._state.decoder.log_probs(ids))
        dtype = str(self._dtype).removeprefix("torch.")
        return ProbeReply(ids, log_probs, dtype, self._cache_shape.num_layers)

    async def _logits_processor(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> LogitsProcessor:
        check_ids(sampling, self._vocab_size)
        grammar = sampling.grammar
        matcher = None if grammar is None else await self._grammars.matcher(grammar)
        words = await asyncio.to_thread(bad_word_ids, self._tokenizer, sampling.bad_words)
        return LogitsProcessor(sampling, prompt_ids, self.eos_ids, words, matcher)

    # PolicyEngine

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        if not self.names.check(name, version):
            return

        def load() -> SamplingState:
            # Tokenizer and chat template of a policy are the engine's own, so the folder's are not
            # read. Running streams wait while the weights are read.
            model = load_weights(folder, self._dtype, self._device)
            use_grouped_attention(model)
            check_same_architecture(model, self._state.model)
            state = self._sampling_state(model, POLICY_MEMORY_SHARE)
            state.version = version
            self._thread.add_policy(name, state)
            return state

        self._policies[name] = await self._run_once(load)
        self.names.add(name, version)

    async def unload_policy(self, name: str) -> None:
        self.names.remove(name)
        self._policies.pop(name, None)
        await self._run_once(lambda: self._thread.remove_policy(name))

    def policy(self, name: str) -> TokenEngine | None:
        if name not in self._policies:
            return None
        return PolicyView(self, name, partial(self._generate, policy=name))

    # TrainEngine

    async def boot(self, job: TrainJob) -> str:
        return await self._run_once(lambda: self._ready_trainer().boot(job))

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        return await self._run(lambda: self._ready_trainer().step(batch, loss))

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        return await self._run(lambda: self._ready_trainer().log_probs(calls, policy))

    async def publish(self, version: int) -> None:
        await self._publish(lambda: self._ready_trainer().model, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the sampler's weights from a model folder. `version` is the version of these
        weights. The trainer's weights do not change."""
        await self._publish(
            lambda: open_model_folder(folder).load_weights(self._dtype, self._device), version
        )

    async def export(self, folder: Path) -> None:
        """Write the trained model to a folder. The weights are written in the dtype in which the
        engine computes, with LoRA adapters merged.

        With adapters and bfloat16, merging rounds the adapters. The exported model then differs
        slightly from the model that the sampler uses, because the sampler keeps the adapters
        separate and unrounded.
        """
        source, dtype = self._folder.path, self._dtype
        await self._run_once(
            lambda: checkpoint.export(folder, self._ready_trainer().model, dtype, source)
        )

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self._run_once(
            lambda: checkpoint.export_adapters(folder, self._ready_trainer(), policy)
        )

    async def save(self, folder: Path) -> None:
        await self._run_once(lambda: checkpoint.save(folder, self._ready_trainer(), self._rng))

    async def restore(self, folder: Path) -> None:
        """Restore the trainer's state and the sampler's random state from a checkpoint. The
        sampler's weights change only with the next `publish`."""
        await self._run_once(lambda: checkpoint.restore(folder, self._ready_trainer(), self._rng))

    def _ready_trainer(self) -> PolicyTrainer:
        """Return the trainer. The first call creates the trainer.

        The trainer has its own copy of the weights. An engine that only samples does not need this
        copy. Call this method on the engine thread, because only this thread may use torch.
        """
        if self._trainer is None:
            self._trainer = PolicyTrainer(
                self._starting_weights(), self._starting_weights, self._dtype
            )
        return self._trainer

    def _starting_weights(self) -> PreTrainedModel:
        return self._folder.load_weights(torch.float32, self._device)

    async def _publish(self, load: Callable[[], PreTrainedModel], version: int) -> None:
        await self._run(lambda: self._state.publish(load, version, self._config.drain_bound_s))

    async def _run(self, start: Callable[[], Generator[None, None, Any]]) -> Any:
        return await asyncio.wrap_future(self._thread.run(start))

    async def _run_once(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine thread, and return its result. No token is sampled while the
        function runs."""

        def task() -> Generator[None, None, Result]:
            result = function()
            yield
            return result

        return await self._run(task)


def _device_memory(device: torch.device) -> int:
    """Return the memory of the device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
