"""Render a chat request to prompt ids with the model's own chat template, as vLLM does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any

from fakevllm_adapters.protocol.errors import bad_request
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest, fit_prompt_text
from fakevllm_adapters.vllm_compat.message_content import content_text

MAX_CACHED_PROMPTS = 256
"""Maximum number of cached prompts. The requests of a group, and retries of a request, need the
same prompt within seconds."""
RESERVED_KWARGS = frozenset(
    {"tokenize", "chat_template", "return_dict", "conversation", "tools", "return_tensors"}
)


class ChatRenderer:
    """Converts chat requests to prompt token ids, and caches the ids of recent prompts. Several
    threads may use one renderer."""

    def __init__(
        self, tokenizer: Any, model_name: str, max_model_len: int, max_prompt_bytes: int
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._max_prompt_bytes = max_prompt_bytes
        self._cache: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._cache_lock = threading.Lock()

    def render(self, request: ChatRequest) -> list[int]:
        """Return the token ids of the request's prompt.

        Raises WireError (400) if the chat template or the model does not accept the messages.
        Raises WireError (400) as well if the prompt is certainly longer than the model's context.
        """
        options = (request.chat_template_kwargs or {}) | {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        truncation = [request.truncate_prompt_tokens is None, request.truncation_side]
        text = json.dumps([request.messages, request.tools, options, truncation], default=str)
        key = hashlib.blake2b(text.encode()).digest()
        with self._cache_lock:
            ids = self._cache.get(key)
        if ids is None:
            ids = tuple(self._render(request, options))
        with self._cache_lock:
            self._cache[key] = ids
            self._cache.move_to_end(key)
            if len(self._cache) > MAX_CACHED_PROMPTS:
                self._cache.popitem(last=False)
        return list(ids)

    def _render(self, request: ChatRequest, options: dict[str, Any]) -> list[int]:
        reserved = sorted(RESERVED_KWARGS & options.keys())
        if reserved:
            raise bad_request(
                f"`{reserved[0]}` cannot be set in chat_template_kwargs.", "chat_template_kwargs"
            )
        messages = [self._message(message) for message in request.messages]
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages, tools=request.tools, tokenize=False, **options
            )
        # A template is code of the model's maker. For a conversation that the template does not
        # accept, it may raise any exception.
        except Exception as error:
            raise bad_request(f"{type(error).__name__}: {error}") from error
        # A lone surrogate is valid in JSON, but cannot be encoded as UTF-8.
        text = text.encode("utf-8", errors="replace").decode()
        text = fit_prompt_text(text, request, self._max_model_len, self._max_prompt_bytes)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str):
            raise bad_request("Each message must have a `role`.", "messages")
        rendered = {key: value for key, value in message.items() if value is not None}
        rendered["content"] = content_text(message.get("content"), self._model_name)
        if role == "assistant" and rendered.get("tool_calls"):
            rendered["tool_calls"] = [
                _with_parsed_arguments(call) for call in rendered["tool_calls"]
            ]
        return rendered


def _with_parsed_arguments(call: Any) -> Any:
    """Return a copy of a tool call whose arguments are a dict instead of a JSON string. Chat
    templates expect a dict and write the JSON themselves. Arguments that are not valid JSON stay a
    string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments: Any = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # Invalid JSON from a model is rendered unchanged.
    return call | {"function": function | {"arguments": arguments}}
