"""The `response` object of the Responses API. It contains the answer, and the fields of the request
with the defaults that vLLM fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fakevllm_adapters.formats.base import EngineInfo, Json
from fakevllm_adapters.formats.responses.items import INCOMPLETE
from fakevllm_adapters.formats.responses.request import ResponsesRequest
from fakevllm_adapters.formats.responses.tools import Tools
from fakevllm_adapters.formats.vllm_versions import Dialect

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0 with which vLLM samples. A response reports the temperature that was
really used."""


@dataclass(slots=True)
class Resource:
    """The `response` object for one request. It is updated while the engine's answer arrives."""

    response_id: str
    created_at: int
    request: ResponsesRequest
    tools: Tools
    engine: EngineInfo
    dialect: Dialect
    model: str
    num_prompt_tokens: int | None = None
    transfer: tuple[Any, Any] = (None, None)
    """`kv_transfer_params` and `ec_transfer_params` of the answer."""

    def update_from(self, upstream: Json) -> None:
        """Update the model, the prompt length, `kv_transfer_params` and `ec_transfer_params` from a
        chat completion or from one of its stream chunks."""
        self.model = upstream.get("model") or self.model
        usage: Json = upstream.get("usage") or {}
        num_prompt = usage.get("prompt_tokens")
        if isinstance(num_prompt, int):
            self.num_prompt_tokens = num_prompt
        kv, ec = self.transfer
        self.transfer = (
            upstream.get("kv_transfer_params") or kv,
            upstream.get("ec_transfer_params") or ec,
        )

    @property
    def max_output_tokens(self) -> int | None:
        """Maximum number of output tokens, or None if it is unknown.

        The maximum is the smaller of two limits: the request's own limit, and the number of tokens
        that the prompt leaves in the context. If only one limit is known, that limit is returned.
        """
        limits = [self.request.max_output_tokens, self.engine.max_model_len]
        if limits[1] is not None:
            limits[1] -= self.num_prompt_tokens or 0
        return min((limit for limit in limits if limit is not None), default=None)

    def as_json(self, status: str, output: list[Json], usage: Json | None) -> Json:
        """Return the `response` object as JSON data with the keys in vLLM's order."""
        request, dialect = self.request, self.dialect
        cut = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        fields: Json = {
            "id": self.response_id,
            "created_at": self.created_at,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": self._temperature,
            "tool_choice": self.tools.repeated_choice(request.tool_choice),
            "tools": self.tools.repeated,
            "top_p": self._top_p,
            "background": False,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
        }
        if dialect.has_prompt_cache_fields:
            fields |= _prompt_cache(request)
        fields["reasoning"] = _dumped(request.reasoning)
        if dialect.has_prompt_cache_fields:
            fields["safety_identifier"] = request.safety_identifier
        return fields | self._rest(status, usage)

    def _rest(self, status: str, usage: Json | None) -> Json:
        request = self.request
        return {
            "service_tier": request.service_tier,
            "status": status,
            "text": _dumped(request.text),
            "top_logprobs": request.top_logprobs if request.with_logprobs else None,
            "truncation": request.truncation,
            "usage": usage,
            "user": request.user,
            "presence_penalty": request.presence_penalty or 0.0,
            "frequency_penalty": request.frequency_penalty or 0.0,
            "kv_transfer_params": self.transfer[0],
            "ec_transfer_params": self.transfer[1],
            "input_messages": None,
            "output_messages": None,
        }

    @property
    def _temperature(self) -> float:
        temperature = 1.0 if self.request.temperature is None else self.request.temperature
        return max(temperature, LOWEST_TEMPERATURE) if temperature > 0 else temperature

    @property
    def _top_p(self) -> float:
        if self._temperature == 0 or self.request.top_p is None:
            return 1.0
        return self.request.top_p


def usage_counts(usage: Json, dialect: Dialect) -> Json:
    """Translate the usage of a chat completion to the `usage` of the Responses format."""
    prompt: Json = usage.get("prompt_tokens_details") or {}
    completion: Json = usage.get("completion_tokens_details") or {}
    num_prompt, num_new = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cache: Json = {"cached_tokens": prompt.get("cached_tokens") or 0}
    if dialect.has_prompt_cache_fields:
        cache["cache_write_tokens"] = prompt.get("created_cache_tokens") or 0
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": cache | {"input_tokens_per_turn": [], "cached_tokens_per_turn": []},
        "output_tokens": num_new,
        "output_tokens_details": {
            "reasoning_tokens": completion.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": num_prompt + num_new,
    }


def _prompt_cache(request: ResponsesRequest) -> Json:
    retention = request.prompt_cache_retention
    return {
        "prompt_cache_options": _dumped(request.prompt_cache_options),
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": "in_memory" if retention == "in-memory" else retention,
    }


def _dumped(value: Any) -> Json | None:
    return None if value is None else value.model_dump(by_alias=True)
