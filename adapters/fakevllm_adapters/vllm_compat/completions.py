"""/v1/completions from the engine's side: vLLM's request schema, its refusals, and its answers and
stream chunks, key by key.

Used by the engines that are not vLLM themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import orjson
from pydantic import BaseModel, Field, ValidationError

from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import Json, bad_request, not_supported
from fakevllm_adapters.vllm_compat.answer import allowed_key
from fakevllm_adapters.vllm_compat.chat import ChatRequest, parse_chat_request, type_refusal

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16

_OWN_OR_CHATS = (
    "prompt prompt_embeds echo suffix logprobs top_logprobs logprob_token_ids max_tokens "
    "max_completion_tokens add_special_tokens best_of messages tools tool_choice functions "
    "parallel_tool_calls chat_template chat_template_kwargs add_generation_prompt "
    "continue_final_message include_reasoning reasoning_effort documents"
)
"""Fields of completions alone, and those of chat alone, which completions ignore."""
_NOT_COMMON = frozenset(_OWN_OR_CHATS.split())

_Id = Annotated[int, Field(ge=0)]
Prompt = str | list[int]
"""A text, or its token ids."""


class _Fields(BaseModel):
    """Those that chat has not, or otherwise."""

    prompt: list[_Id] | list[list[_Id]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    suffix: str | None = None
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompts: list[Prompt]
    echo: bool
    logprobs: int | None
    """How many of the likeliest are told beside each token; None: no logprobs at all."""
    limit: int
    """Asked-for number of new tokens."""
    is_echo_alone: bool
    """The prompt is all that is asked for, of which vLLM makes one token and does not show it."""
    add_special_tokens: bool
    tokens_as_ids: bool
    """Tokens in logprobs are named by their ids."""
    common: ChatRequest
    """All else means what it means in chat."""


def parse_completion_request(raw: bytes) -> CompletionRequest:
    """Raises WireError, worded as vLLM words it."""
    body = parse_json(raw)
    if isinstance(body, dict):
        _check_meaning(cast(Json, body))
    try:
        fields = _Fields.model_validate(body)
    except ValidationError as error:
        raise type_refusal(error) from None
    if fields.suffix is not None:
        raise bad_request("suffix is not currently supported")
    is_echo_alone = bool(fields.echo) and fields.max_tokens == 0
    limit = 1 if is_echo_alone else fields.max_tokens
    limit = DEFAULT_MAX_TOKENS if limit is None else limit
    return CompletionRequest(
        prompts=_prompts(fields.prompt),
        echo=bool(fields.echo),
        logprobs=fields.logprobs,
        limit=limit,
        is_echo_alone=is_echo_alone,
        add_special_tokens=fields.add_special_tokens,
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        common=_common(cast(Json, body), fields, limit),
    )


def _prompts(prompt: object) -> list[Prompt]:
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):  # pyright: ignore[reportUnknownVariableType]
        return cast(list[Prompt], prompt)
    return [cast(Prompt, prompt)]


def _common(body: Json, fields: _Fields, limit: int) -> ChatRequest:
    """Raises WireError."""
    common = {key: value for key, value in body.items() if key not in _NOT_COMMON}
    common["messages"] = [{"role": "user", "content": ""}]
    common["max_tokens"] = limit
    if fields.logprobs is not None:
        common |= {"logprobs": True, "top_logprobs": fields.logprobs}
    return parse_chat_request(orjson.dumps(common))


def _check_meaning(body: Json) -> None:
    """What vLLM looks at before the types; then, what these engines cannot honour."""
    if body.get("prompt") in (None, "") and not body.get("prompt_embeds"):
        raise bad_request(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "prompt",
        )
    _check_num_prompts(body.get("prompt"))
    logprobs: object = body.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, int | float):
        raise bad_request("`logprobs` must be an integer.", "logprobs", logprobs)
    if logprobs is not None and logprobs < 0:
        raise bad_request("`logprobs` must be a positive value.", "logprobs", logprobs)
    for name in ("prompt_embeds", "logprob_token_ids"):
        if body.get(name):
            raise not_supported(name)
    if body.get("echo") and logprobs is not None:
        raise not_supported("logprobs with echo")


def _check_num_prompts(prompt: object) -> None:
    if not isinstance(prompt, list):
        return
    parts = cast(list[object], prompt)
    if not parts or [] in parts or "" in parts:
        raise bad_request("The decoder prompt cannot be empty")
    if len(parts) > MAX_PROMPTS and not all(isinstance(part, int) for part in parts):
        raise bad_request(
            f"prompt list length {len(parts)} exceeds the maximum allowed count of {MAX_PROMPTS}. "
            "To increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable. "
            "(parameter=prompt)",
            "prompt",
        )


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes the answer to one request: the same id, time, model and fingerprint on every piece."""

    id: str
    created: int
    model: str
    fingerprint: str

    def completion(self, choices: Sequence[TextChoice], usage: Json) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice.whole() for choice in choices],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def chunk(self, choice: TextChoice, usage: Json | None, *, closes_stream: bool) -> Json:
        """`usage`: so far, where it is told all along. `closes_stream`: no usage chunk follows, so
        a choice's last chunk carries the fingerprint."""
        chunk = self._chunk([choice.streamed()])
        if usage is not None:
            chunk["usage"] = usage
        if closes_stream and choice.finish_reason is not None:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk | {"kv_transfer_params": None}

    def usage_chunk(self, usage: Json) -> Json:
        return self._chunk([]) | {"usage": usage, "system_fingerprint": self.fingerprint}

    def _chunk(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(slots=True)
class TextChoice:
    """A choice, or what a chunk adds to one."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    weight_versions: list[Json] | None
    allowed_tokens: Json | None = None

    def whole(self) -> Json:
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.token_ids,
            "prompt_logprobs": None,
            "prompt_token_ids": self.prompt_ids,
            "routed_experts": None,
            "weight_versions": self.weight_versions,
        } | allowed_key(self.allowed_tokens)

    def streamed(self) -> Json:
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_token_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "weight_versions": self.weight_versions,
        } | allowed_key(self.allowed_tokens)


def legacy_logprobs(entries: Sequence[tuple[str, float, dict[str, float]]], offset: int) -> Json:
    """The logprobs object of (token, logprob, {token: logprob} of the likeliest); `offset`:
    characters of the text before the first."""
    offsets: list[int] = []
    for token, _, _ in entries:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob for _, logprob, _ in entries],
        "tokens": [token for token, _, _ in entries],
        "top_logprobs": [tops for _, _, tops in entries],
    }
