"""Request schema, checks, response bodies and stream chunks of /v1/completions, equal to vLLM's.

The bundled engines, which are this project's own, use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import orjson
from pydantic import BaseModel, Field, ValidationError

from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import Json, bad_request, not_supported
from fakevllm_adapters.vllm_compat.chat_parameter_errors import check_num_token_ids
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest, parse_chat_request, type_refusal
from fakevllm_adapters.vllm_compat.chat_response import allowed_tokens_field

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16

_UNSHARED_FIELDS = (
    "prompt prompt_embeds echo suffix logprobs top_logprobs logprob_token_ids max_tokens "
    "max_completion_tokens add_special_tokens best_of messages tools tool_choice functions "
    "parallel_tool_calls chat_template chat_template_kwargs add_generation_prompt "
    "continue_final_message include_reasoning reasoning_effort documents"
)
"""Fields of completions requests that chat requests do not have, and fields of chat requests that
completions requests ignore."""
_NOT_COMMON = frozenset(_UNSHARED_FIELDS.split())

_Id = Annotated[int, Field(ge=0)]
Prompt = str | list[int]
"""Text of a prompt, or its token ids."""


class _Fields(BaseModel):
    """Fields that exist only in completions requests, or that mean something else in chat
    requests."""

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
    """A validated completions request. `common` has the fields that chat requests have, too."""

    prompts: list[Prompt]
    echo: bool
    logprobs: int | None
    """Number of most likely tokens to report for each position. None means no logprobs at all."""
    max_new_tokens: int
    """Maximum number of new tokens, from the request or from vLLM's default."""
    is_echo_only: bool
    """Whether the request asks only for its own prompt (`echo` with `max_tokens` 0). As in vLLM,
    the engine then samples one token and does not return it."""
    add_special_tokens: bool
    returns_tokens_as_ids: bool
    """Whether the returned logprobs name tokens by their ids instead of their texts."""
    common: ChatRequest
    """All other fields, which have the same meaning in chat requests."""


def parse_completion_request(raw: bytes) -> CompletionRequest:
    """Parse and validate the body of a completions request.

    Raises WireError with vLLM's own message if the body is invalid.
    """
    body = parse_json(raw)
    if isinstance(body, dict):
        _check_before_types(cast(Json, body))
    try:
        fields = _Fields.model_validate(body)
    except ValidationError as error:
        raise type_refusal(error) from None
    if fields.suffix is not None:
        raise bad_request("suffix is not currently supported")
    is_echo_only = bool(fields.echo) and fields.max_tokens == 0
    max_tokens = 1 if is_echo_only else fields.max_tokens
    max_new_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    return CompletionRequest(
        prompts=_prompt_list(fields.prompt),
        echo=bool(fields.echo),
        logprobs=fields.logprobs,
        max_new_tokens=max_new_tokens,
        is_echo_only=is_echo_only,
        add_special_tokens=fields.add_special_tokens,
        returns_tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        common=_common_fields(cast(Json, body), fields, max_new_tokens),
    )


def _prompt_list(prompt: object) -> list[Prompt]:
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):  # pyright: ignore[reportUnknownVariableType]
        return cast(list[Prompt], prompt)
    return [cast(Prompt, prompt)]


def _common_fields(body: Json, fields: _Fields, max_new_tokens: int) -> ChatRequest:
    """Return a chat request with the fields that chat requests and completions requests have in
    common.

    Raises WireError (400) if one of these fields is invalid.
    """
    common = {key: value for key, value in body.items() if key not in _NOT_COMMON}
    common["messages"] = [{"role": "user", "content": ""}]
    common["max_tokens"] = max_new_tokens
    if fields.logprobs is not None:
        common |= {"logprobs": True, "top_logprobs": fields.logprobs}
    return parse_chat_request(orjson.dumps(common))


def _check_before_types(body: Json) -> None:
    """Run vLLM's first checks of a completions request, which come before the validation of the
    fields' types. Raises WireError (400) if a check fails, or if no engine of this project supports
    a field of the body."""
    if body.get("prompt") in (None, "") and not body.get("prompt_embeds"):
        raise bad_request(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "prompt",
        )
    _check_num_prompts(body.get("prompt"))
    check_num_token_ids("prompt", body.get("prompt"))
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
    """Builder of the response body for one completions request, or of its stream chunks.

    The id, creation time, model and fingerprint are the same in all chunks.
    """

    id: str
    created: int
    model: str
    fingerprint: str

    def completion(self, choices: Sequence[TextChoice], usage: Json) -> Json:
        """Return the body of a /v1/completions response that is not streamed."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice.as_json() for choice in choices],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def chunk(self, choice: TextChoice, usage: Json | None, *, closes_stream: bool) -> Json:
        """Return a stream chunk with new text of one choice.

        `usage` is the usage so far, or None if only the stream's last chunk reports the usage.
        `closes_stream` is True if the stream will have no usage chunk. In this case, the last chunk
        of the choice contains the system fingerprint.
        """
        chunk = self._chunk([choice.as_chunk_json()])
        if usage is not None:
            chunk["usage"] = usage
        if closes_stream and choice.finish_reason is not None:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk | {"kv_transfer_params": None}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the usage chunk, which is the last chunk of a stream. It reports the token counts
        and has no choices."""
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
    """A whole choice of a completion, or the part of a choice that one stream chunk adds."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    weight_versions: list[Json] | None
    allowed_tokens: Json | None = None

    def as_json(self) -> Json:
        """Return this choice as a JSON object for the body of a response that is not streamed."""
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
        } | allowed_tokens_field(self.allowed_tokens)

    def as_chunk_json(self) -> Json:
        """Return this part of a choice as a JSON object for a stream chunk."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_token_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "weight_versions": self.weight_versions,
        } | allowed_tokens_field(self.allowed_tokens)


def legacy_logprobs(entries: Sequence[tuple[str, float, dict[str, float]]], offset: int) -> Json:
    """Return the `logprobs` object of a choice in a response of /v1/completions.

    `entries` has one tuple for each token. The tuple contains the token's text, the token's
    logprob, and a dict with the logprobs of the most likely tokens by text. `offset` is the number
    of characters before the first token.
    """
    offsets: list[int] = []
    for token, _, _ in entries:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob for _, logprob, _ in entries],
        "tokens": [token for token, _, _ in entries],
        "top_logprobs": [top for _, _, top in entries],
    }
