"""Render a chat request to prompt ids with the model's own chat template, as vLLM does."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any

from fakevllm_adapters.protocol.errors import bad_request
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest

MAX_CACHED_PROMPTS = 256
"""Number of cached prompts. Siblings and retries of a request need the same prompt within
seconds."""
RESERVED_KWARGS = frozenset(
    {"tokenize", "chat_template", "return_dict", "conversation", "tools", "return_tensors"}
)
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""For each type of content part, the field that holds its text."""
MEDIA_PARTS = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "input_audio",
        "video_url",
        "file",
    }
)


class ChatRenderer:
    """Renders requests and caches the prompts. It is not thread-safe."""

    def __init__(self, tokenizer: Any, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._cache: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def render(self, request: ChatRequest) -> list[int]:
        """Return the token ids of the request's prompt. Raises WireError (400) for a conversation
        that the template or the model does not accept."""
        extra = request.model_extra or {}
        options = (request.chat_template_kwargs or {}) | {
            "add_generation_prompt": extra.get("add_generation_prompt", True),
            "continue_final_message": extra.get("continue_final_message", False),
        }
        text = json.dumps([request.messages, request.tools, options], default=str)
        key = hashlib.blake2b(text.encode()).digest()
        if key not in self._cache:
            self._cache[key] = tuple(self._render(request, options))
            if len(self._cache) > MAX_CACHED_PROMPTS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return list(self._cache[key])

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
        # A template is the model maker's code, and raises any exception for a conversation that it
        # does not accept.
        except Exception as error:
            raise bad_request(f"{type(error).__name__}: {error}") from error
        # A lone surrogate is valid in JSON, but cannot be encoded as UTF-8.
        text = text.encode("utf-8", errors="replace").decode()
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str):
            raise bad_request("Each message must have a `role`.", "messages")
        rendered = {key: value for key, value in message.items() if value is not None}
        rendered["content"] = self._text(message.get("content"))
        if role == "assistant" and rendered.get("tool_calls"):
            rendered["tool_calls"] = [
                _with_parsed_arguments(call) for call in rendered["tool_calls"]
            ]
        return rendered

    def _text(self, content: Any) -> str:
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise bad_request("`content` must be a string or a list of parts.", "messages")
        return "\n".join(self._part(part) for part in content)

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA_PARTS:
            raise bad_request(f"{self._model_name} is not a multimodal model")
        if kind not in TEXT_PARTS:
            raise bad_request(f"Unknown part type: {kind}")
        text = part.get(TEXT_PARTS[kind])
        return text if isinstance(text, str) else ""


def _with_parsed_arguments(call: Any) -> Any:
    """Parse the arguments of a tool call, because templates print the mapping as JSON
    themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments: Any = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # Invalid JSON from a model is rendered unchanged.
    return call | {"function": function | {"arguments": arguments}}
