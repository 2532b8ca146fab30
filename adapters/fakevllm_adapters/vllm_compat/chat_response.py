"""Response bodies and stream chunks of /v1/chat/completions, in vLLM's form.

The bundled engines, which are this project's own, use this module. As in vLLM, keys have a fixed
order, and keys with the value null are written.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from fakevllm_adapters.protocol.errors import Json

FINGERPRINT = "vllm-fakevllm-0"
"""The `system_fingerprint` of the bundled engines."""


def new_response_id(request_id: str | None) -> str:
    """Return the id of a chat completion. It consists of vLLM's prefix `chatcmpl-` and the
    request's own id. If the request has no id, a random id is used."""
    return f"chatcmpl-{request_id or secrets.token_hex(8)}"


def new_tool_call_id() -> str:
    """Return a random id for one tool call, with vLLM's prefix."""
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


@dataclass(slots=True)
class Choice:
    """One finished choice of a chat completion."""

    index: int
    message: Json
    finish_reason: str
    logprobs: Json | None = None
    stop_reason: str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[Json] | None = None
    allowed_tokens: Json | None = None
    """For each token, the set from which it was sampled. vLLM has no such key. It is written only
    if the request has `return_allowed_tokens`."""

    def as_json(self) -> Json:
        """Return the choice as a JSON object with vLLM's keys."""
        return {
            "index": self.index,
            "message": self.message,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.token_ids,
            "routed_experts": None,
            "weight_versions": self.weight_versions,
        } | allowed_tokens_field(self.allowed_tokens)


def allowed_tokens_field(allowed_tokens: Json | None) -> Json:
    """Return a dict with a choice's field `allowed_tokens`, or {} if the argument is None."""
    return {} if allowed_tokens is None else {"allowed_tokens": allowed_tokens}


def assistant_message(content: str | None, tool_calls: Sequence[Json] = ()) -> Json:
    """Return an assistant message with vLLM's keys. The key `tool_calls` is left out if empty."""
    message: Json = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    message["reasoning"] = None
    return message


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Builder of the response body for one chat request, or of its stream chunks.

    The id, creation time, model and fingerprint are the same in all chunks.
    """

    id: str
    created: int
    model: str
    fingerprint: str

    def completion(
        self, choices: Sequence[Choice], usage: Json, prompt_ids: list[int] | None
    ) -> Json:
        """Return the body of a /v1/chat/completions response that is not streamed."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice.as_json() for choice in choices],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def role_chunk(self, index: int, prompt_ids: list[int] | None) -> Json:
        """Return the first stream chunk of a choice. It has the message's role and no content."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk([choice]) | {"prompt_token_ids": prompt_ids, "prompt_text": None}

    def delta_chunk(
        self, index: int, delta: Json, logprobs: Json | None, token_ids: list[int] | None
    ) -> Json:
        """Return a stream chunk with new content or new tool calls of one choice."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": token_ids,
        }
        return self._chunk([choice]) | {"kv_transfer_params": None}

    def finish_chunk(self, choice: Choice, delta: Json, *, closes_stream: bool) -> Json:
        """Return the last stream chunk of a choice.

        `closes_stream` is True if the stream will have no usage chunk. In this case, the last chunk
        of the choice contains the system fingerprint.
        """
        last: Json = {
            "index": choice.index,
            "delta": delta,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids,
            "weight_versions": choice.weight_versions,
        } | allowed_tokens_field(choice.allowed_tokens)
        fingerprint: Json = {"system_fingerprint": self.fingerprint} if closes_stream else {}
        return self._chunk([last]) | fingerprint | {"kv_transfer_params": None}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the usage chunk, which is the last chunk of a stream. It reports the token counts
        and has no choices."""
        return self._chunk([]) | {"usage": usage, "system_fingerprint": self.fingerprint}

    def _chunk(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_counts(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the `usage` object of a response for these numbers of prompt and completion tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def model_card(name: str, root: str, created: int, max_model_len: int) -> Json:
    """Return a model's entry for the response of `/v1/models`. `created` is in Unix seconds."""
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
