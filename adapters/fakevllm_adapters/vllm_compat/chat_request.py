"""Request schema of /v1/chat/completions, with the same validation as in vLLM.

The bundled engines, which are this project's own, use this module. The schema has every field that
at least one bundled engine supports. `chat_parameter_errors` refuses requests with vLLM's other
fields.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import Json, WireError, bad_request, schema_error
from fakevllm_adapters.vllm_compat.chat_parameter_errors import (
    MAX_STOP_STRINGS,
    check,
    check_before_types,
)
from fakevllm_adapters.vllm_compat.grammar import (
    AnyResponseFormat,
    Grammar,
    StructuredOutputs,
    Tool,
    arguments_grammar,
    calls_grammar,
    parse_grammar,
)

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Stops = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]


@with_config(ConfigDict(extra="allow"))
class StreamOptions(TypedDict):
    """The value of `stream_options`, with vLLM's fields."""

    include_usage: NotRequired[bool | None]
    continuous_usage_stats: NotRequired[bool | None]


class ChatRequest(BaseModel):
    """A chat request with the fields that the bundled engines (this project's own) support.

    A field that vLLM accepts and ignores is ignored here too. If vLLM supports a field and no
    bundled engine does, `chat_parameter_errors` refuses the request.
    """

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: AnyResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: _Int64 | None = None
    stop: str | _Stops | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: str | None = None
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | str | None = None
    parallel_tool_calls: bool | None = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_allowed_tokens: Any = None
    """Whether to report, for each token, the set from which it was sampled. vLLM has no such field.
    Only the value True counts, because an app may use the name for something else."""
    request_id: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """The request's own limit on new tokens, or None if the request has no limit."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    @property
    def stops(self) -> list[str]:
        """Stop strings of the request, as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that reports the usage (token counts)."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of the stream reports the usage so far. As in vLLM, this requires
        `include_usage`."""
        options = self.stream_options or {}
        return self.include_usage and bool(options.get("continuous_usage_stats"))

    @property
    def requests_allowed_tokens(self) -> bool:
        """Whether the response must report, for each token, the set of tokens that were allowed."""
        return self.return_allowed_tokens is True

    @property
    def offers_tools(self) -> bool:
        """Whether the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def named_tool(self) -> str | None:
        """Name of the tool that the answer must call, or None if `tool_choice` names no tool."""
        if not isinstance(self.tool_choice, dict):
            return None
        return self.tool_choice["function"]["name"]

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the answer must match, or None if the answer is not constrained.

        If `tool_choice` forces a tool call, the grammar describes this tool call. As in vLLM, every
        other grammar of the request is then ignored. Raises WireError (400) if the grammar is
        invalid.
        """
        if self.tools and self.tool_choice == "required":
            return calls_grammar(self.tools, is_parallel=bool(self.parallel_tool_calls))
        if self.tools and (name := self.named_tool) is not None:
            return arguments_grammar(
                next(tool for tool in self.tools if tool["function"]["name"] == name)
            )
        return parse_grammar(self.structured_outputs, self.response_format)


def parse_chat_request(raw: bytes) -> ChatRequest:
    """Parse and validate the body of a chat request.

    Raises WireError with vLLM's own message if the body is invalid.
    """
    body = parse_json(raw)
    if isinstance(body, dict):
        check_before_types(body)  # pyright: ignore[reportUnknownArgumentType]
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise type_refusal(error) from None
    check(request)
    return request


def type_refusal(error: ValidationError) -> WireError:
    """Return vLLM's 400 error for a body in which fields are missing or have the wrong type."""
    problems: list[Any] = list(error.errors(include_url=False))
    return schema_error([_without_union_branches(dict(problem)) for problem in problems])


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict"})


def _without_union_branches(problem: Json) -> Json:
    """Return a validation problem in which the location has only keys and indices of the body.

    For a field with a union type, pydantic adds the names of the union's members to the location.
    This function removes the names of the members.
    """
    path = [part for part in problem["loc"] if part not in _TYPE_NAMES and "[" not in str(part)]
    return problem | {"loc": tuple(path)}


def allowed_new_tokens(prompt_tokens: int, limit: int | None, max_model_len: int) -> int:
    """Return the maximum number of new tokens for a request.

    The maximum is the smaller of two numbers: the request's own `limit`, and the number of tokens
    that the prompt leaves in the context. As in vLLM, WireError (400) is raised if the prompt fills
    the context, or if `limit` exceeds the whole context.
    """
    if prompt_tokens >= max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains at least {prompt_tokens} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    if limit is not None and limit > max_model_len:
        raise bad_request(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            limit,
        )
    remaining = max_model_len - prompt_tokens
    return remaining if limit is None else min(limit, remaining)


def fit_prompt_text(
    text: str, request: ChatRequest, max_model_len: int, max_prompt_bytes: int
) -> str:
    """Return a prompt text that has at most `max_prompt_bytes` bytes.

    A longer text cannot fit in the context, and its tokenization would take seconds. If the request
    has `truncate_prompt_tokens`, the text is shortened. Without this field, WireError (400) is
    raised.
    """
    raw = text.encode(errors="replace")
    if len(raw) <= max_prompt_bytes:
        return text
    if request.truncate_prompt_tokens is None:
        raise prompt_too_large(len(raw), max_model_len, max_prompt_bytes)
    is_head = request.truncation_side == "right"
    kept = raw[:max_prompt_bytes] if is_head else raw[-max_prompt_bytes:]
    return kept.decode(errors="ignore")  # the cut may split a character


def prompt_too_large(num_bytes: int, max_model_len: int, max_prompt_bytes: int) -> WireError:
    """Return a 400 error for a prompt text that is too large for the context.

    The message is the same as vLLM's, but it gives the size of the prompt in bytes.
    """
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
        f"contains {num_bytes} bytes (more than {max_prompt_bytes} bytes, which is the upper bound "
        f"for {max_model_len} input tokens). Please reduce the length of the input prompt.",
        "input_text",
        num_bytes,
    )


def truncate_prompt(prompt_ids: list[int], request: ChatRequest, max_model_len: int) -> list[int]:
    """Return the prompt's token ids, cut to `truncate_prompt_tokens` ids if the request has this
    field.

    The end of the prompt is kept, or the beginning if `truncation_side` is "right". If
    `truncate_prompt_tokens` is -1, the prompt is cut to the greatest length that leaves room for
    `max_tokens` in the context. Like vLLM, the function raises WireError (400) for a value above
    this length.
    """
    max_prompt_tokens = request.truncate_prompt_tokens
    if max_prompt_tokens is None:
        return prompt_ids
    available = max_model_len - (request.max_new_tokens or 0)
    if max_prompt_tokens > available >= 0:
        raise bad_request(
            f"truncate_prompt_tokens={max_prompt_tokens} cannot be greater than max_model_len - "
            f"max_tokens = {available}. Please request a smaller truncation size.",
            "truncate_prompt_tokens",
            max_prompt_tokens,
        )
    length = available if max_prompt_tokens < 0 else max_prompt_tokens
    if length >= len(prompt_ids):
        return prompt_ids
    if request.truncation_side == "right":
        return prompt_ids[:length]
    return prompt_ids[len(prompt_ids) - max(length, 0) :]
