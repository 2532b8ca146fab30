"""The `response` object: what was asked, repeated as vLLM understood it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fakevllm_adapters.formats.base import Engine, Json
from fakevllm_adapters.formats.responses.dialect import Dialect
from fakevllm_adapters.formats.responses.items import INCOMPLETE
from fakevllm_adapters.formats.responses.request import ResponsesRequest
from fakevllm_adapters.formats.responses.tools import Tools

LOWEST_TEMPERATURE = 0.01
"""Above zero vLLM samples with no lower one, and says so."""


@dataclass(slots=True)
class Resource:
    """Writes the `response` object of one request. What the upstream's answer tells is noted as it
    comes."""

    response_id: str
    created_at: int
    asked: ResponsesRequest
    tools: Tools
    engine: Engine
    dialect: Dialect
    model: str
    num_prompt_tokens: int | None = None
    transfer: tuple[Any, Any] = (None, None)
    """The answer's `kv_transfer_params` and `ec_transfer_params`."""

    def note(self, upstream: Json) -> None:
        """upstream: a chat completion or a chunk of one."""
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
        """What the context leaves, where that is known, and not more than was asked."""
        limits = [self.asked.max_output_tokens, self.engine.max_model_len]
        if limits[1] is not None:
            limits[1] -= self.num_prompt_tokens or 0
        return min((limit for limit in limits if limit is not None), default=None)

    def as_json(self, status: str, output: list[Json], usage: Json | None) -> Json:
        asked, dialect = self.asked, self.dialect
        cut = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        fields: Json = {
            "id": self.response_id,
            "created_at": self.created_at,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "metadata": asked.metadata,
            "model": self.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": self._temperature,
            "tool_choice": self.tools.repeated_choice(asked.tool_choice),
            "tools": self.tools.repeated,
            "top_p": self._top_p,
            "background": False,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt": None,
        }
        if dialect.has_prompt_cache_fields:
            fields |= _prompt_cache(asked)
        fields["reasoning"] = _dumped(asked.reasoning)
        if dialect.has_prompt_cache_fields:
            fields["safety_identifier"] = asked.safety_identifier
        return fields | self._rest(status, usage)

    def _rest(self, status: str, usage: Json | None) -> Json:
        asked = self.asked
        return {
            "service_tier": asked.service_tier,
            "status": status,
            "text": _dumped(asked.text),
            "top_logprobs": asked.top_logprobs if asked.with_logprobs else None,
            "truncation": asked.truncation,
            "usage": usage,
            "user": asked.user,
            "presence_penalty": asked.presence_penalty or 0.0,
            "frequency_penalty": asked.frequency_penalty or 0.0,
            "kv_transfer_params": self.transfer[0],
            "ec_transfer_params": self.transfer[1],
            "input_messages": None,
            "output_messages": None,
        }

    @property
    def _temperature(self) -> float:
        asked = 1.0 if self.asked.temperature is None else self.asked.temperature
        return max(asked, LOWEST_TEMPERATURE) if asked > 0 else asked

    @property
    def _top_p(self) -> float:
        if self._temperature == 0 or self.asked.top_p is None:
            return 1.0
        return self.asked.top_p


def usage_of(usage: Json, dialect: Dialect) -> Json:
    """usage: the chat format's."""
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


def _prompt_cache(asked: ResponsesRequest) -> Json:
    retention = asked.prompt_cache_retention
    return {
        "prompt_cache_options": _dumped(asked.prompt_cache_options),
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": "in_memory" if retention == "in-memory" else retention,
    }


def _dumped(value: Any) -> Json | None:
    return None if value is None else value.model_dump(by_alias=True)
