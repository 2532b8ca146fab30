"""vLLM's routes /tokenize and /detokenize. These routes use the tokenizer of a TokenEngine, which
is an engine that samples tokens."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError

from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import bad_request, not_supported
from fakevllm_adapters.vllm_compat.chat_parameter_errors import (
    check_continuation,
    check_conversation,
    check_num_entries,
    check_num_token_ids,
)
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest, type_refusal
from fakevllm_server.backends.http.sampling_parameters import check_model
from fakevllm_server.types.backend import TokenEngine

Json = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)

MIN_TEXT_BYTES = 2**20
"""`/tokenize` accepts texts of up to this many bytes, even if a text cannot fit into the context.
The reason is that apps count the tokens of long texts before they cut the texts. Tokenizing a text
of this size takes about two seconds."""


class _TokenizePrompt(BaseModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class _TokenizeChat(ChatRequest):
    add_special_tokens: bool = False
    return_token_strs: bool | None = False


class _Detokenize(BaseModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]


def tokenize(engine: TokenEngine, raw: bytes) -> Json:
    """Return the response to a /tokenize request. `raw` is the request body, with a text or a list
    of messages.

    Raises WireError with vLLM's message for an invalid body.
    """
    body: object = parse_json(raw)
    if isinstance(body, dict) and "messages" in body and "prompt" not in body:
        request = _read_chat(cast(Json, body))
        check_model(engine, request.model)
        ids = engine.render(request)
    else:
        request = _validated(_TokenizePrompt, cast(object, body))
        check_model(engine, request.model)
        _check_text_bytes(engine, request.prompt)
        ids = engine.encode(request.prompt, request.add_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": engine.max_model_len,
        "tokens": ids,
        "token_strs": engine.token_strings(ids) if request.return_token_strs else None,
    }


def detokenize(engine: TokenEngine, raw: bytes) -> Json:
    """Return the response to a /detokenize request. `raw` is the request body, with token ids.

    Raises WireError with vLLM's message for an invalid body.
    """
    body: Any = parse_json(raw)
    if isinstance(body, dict):
        check_num_token_ids("tokens", cast(Json, body).get("tokens"))
    request = _validated(_Detokenize, cast(object, body))
    check_model(engine, request.model)
    try:
        return {"prompt": engine.decode(request.tokens, skip_special_tokens=False)}
    except OverflowError as error:
        raise bad_request(str(error), "tokens") from None


def _check_text_bytes(engine: TokenEngine, text: str) -> None:
    """Check the size of a text. Raises WireError (400) if the text would take too long to
    tokenize."""
    num_bytes = len(text.encode(errors="replace"))
    most = max(engine.max_prompt_bytes, MIN_TEXT_BYTES)
    if num_bytes > most:
        raise bad_request(
            f"`prompt` must have at most {most} bytes, got {num_bytes}.", "prompt", num_bytes
        )


def _read_chat(body: Json) -> _TokenizeChat:
    check_num_entries(body)
    check_continuation(body)
    request = _validated(_TokenizeChat, body)
    check_conversation(request)
    if request.add_special_tokens:
        raise not_supported("add_special_tokens")
    return request


def _validated(model: type[Model], body: object) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise type_refusal(error) from None
