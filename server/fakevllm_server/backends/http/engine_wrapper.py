"""The base class of engines that forward requests to another engine, which samples the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.types.backend import TokenEngine
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.sampling import Sampling, Token


class EngineWrapper(ABC):
    """A TokenEngine that passes all calls except `generate` on to another TokenEngine. A subclass
    defines `generate`, which samples tokens."""

    def __init__(self, engine: TokenEngine, model_name: str) -> None:
        self._engine = engine
        self.model_name = model_name
        self.max_model_len = engine.max_model_len
        self.max_prompt_bytes = engine.max_prompt_bytes
        self.default_sampling: dict[str, Any] = engine.default_sampling
        self.eos_ids = engine.eos_ids
        self.reports_allowed = engine.reports_allowed

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def render(self, request: ChatRequest) -> list[int]:
        return self._engine.render(request)

    def check(self, sampling: Sampling) -> None:
        self._engine.check(sampling)

    async def probe(self) -> ProbeReply:
        return await self._engine.probe()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._engine.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._engine.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return self._engine.token_strings(ids)

    @abstractmethod
    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]: ...
