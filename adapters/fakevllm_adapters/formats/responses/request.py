"""The schema of Responses requests, which is equal to vLLM's schema, and the translation of these
requests to chat completions requests.

The chat request has the fields that vLLM itself derives from a Responses request. Fields that vLLM
ignores at /v1/responses are left out. Some of these fields would have an effect at
/v1/chat/completions.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fakevllm_adapters.formats.base import Json, NotTranslated
from fakevllm_adapters.formats.responses.input import Input, continues, messages_of
from fakevllm_adapters.formats.responses.refusals import (
    check_after_types,
    check_before_types,
    malformed,
)
from fakevllm_adapters.formats.responses.tools import Tools, tool_problems, tools_of
from fakevllm_adapters.formats.vllm_versions import Dialect
from fakevllm_adapters.protocol.errors import not_supported

PASSED_ON = (
    *("model", "temperature", "top_p", "top_k", "logit_bias", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output"),
    *("skip_special_tokens", "structured_outputs", "chat_template_kwargs", "include_reasoning"),
    *("priority", "cache_salt", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"),
    *("kv_transfer_params", "ec_transfer_params"),
)
"""Fields with the same meaning in both formats, copied to the chat request."""
PASSED_ON_NEW = ("min_p", "stop_token_ids", "spaces_between_special_tokens", "session_id")
"""Further fields that are copied to the chat request in new versions of vLLM."""
LOGPROBS = "message.output_text.logprobs"

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]
Level = Literal["auto", "concise", "detailed"]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]

_BRANCH = re.compile(r"^(str|int|float|bool)$|\[")
"""Pattern for names of types that pydantic adds to the location of a problem. vLLM's errors do not
have these names, but they have the names of vLLM's own classes."""


class OpenModel(BaseModel):
    """A pydantic model that accepts and keeps unknown fields."""

    # With from_attributes, pydantic describes a value of another type in vLLM's words.
    model_config = ConfigDict(extra="allow", from_attributes=True)


class Reasoning(OpenModel):
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    generate_summary: Level | None = None
    mode: str | None = None
    summary: Level | None = None


class ResponseFormatText(OpenModel):
    type: Literal["text"]


class ResponseFormatTextJSONSchemaConfig(OpenModel):
    name: str
    schema_: dict[str, object] = Field(alias="schema")
    type: Literal["json_schema"]
    description: str | None = None
    strict: bool | None = None


class ResponseFormatJSONObject(OpenModel):
    type: Literal["json_object"]


class TextConfig(OpenModel):
    format: (
        ResponseFormatText | ResponseFormatTextJSONSchemaConfig | ResponseFormatJSONObject | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class PromptCacheOptions(BaseModel):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | None = None


class ResponsesRequest(BaseModel):
    """The validated fields of a Responses request.

    The fields are in vLLM's order, because an error response lists problems in the order of fields.
    Unknown fields are accepted and ignored.
    """

    background: bool = False
    include: list[Include] | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    logit_bias: dict[str, float] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Any = "auto"
    tools: list[Any] = Field(default_factory=list[Any])
    top_logprobs: int | None = 0
    top_p: float | None = None
    top_k: int | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None
    request_id: str = ""
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    enable_response_messages: bool = False
    previous_input_messages: list[dict[str, Any]] | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the response must contain the logprobs of the answer's text."""
        return LOGPROBS in (self.include or ()) and self.top_logprobs is not None


def parse_request(body: Json) -> ResponsesRequest:
    """Return the validated fields of a request body.

    Raises NotTranslated in two cases: vLLM would refuse the body, or chat completions cannot
    express the body. In the first case, the exception carries vLLM's own error response.
    """
    check_before_types(body)
    try:
        request = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise malformed(_problems(error, body)) from None
    problems = tool_problems(request.tools)
    if problems:
        raise malformed(problems)
    check_after_types(request.background, body)
    for name in ("enable_response_messages", "previous_input_messages"):
        if getattr(request, name):
            raise NotTranslated(name, not_supported(name))
    return request


def _problems(error: ValidationError, body: Json) -> list[Json]:
    """Return the validation problems of a body. Their locations contain only keys and indices of
    the body."""
    problems: list[Json] = []
    for problem in error.errors(include_url=False):
        path = [part for part in problem["loc"] if not _BRANCH.search(str(part))]
        value: Any = problem["input"]
        if problem["type"] == "missing" and len(path) == 1 and not body.get("tools"):
            # vLLM sets `tool_choice` in a body without tools, and its error gives the number of
            # fields.
            value = {"tool_choice": "none"} | body
        problems.append(dict(problem) | {"loc": tuple(path), "input": value})
    return problems


def chat_request(request: ResponsesRequest, body: Json, tools: Tools, dialect: Dialect) -> Json:
    """Translate a Responses request to a chat completions request.

    Raises NotTranslated if no exact translation exists.
    """
    names = PASSED_ON + (PASSED_ON_NEW if dialect.has_prompt_cache_fields else ())
    chat = {name: body[name] for name in names if body.get(name) is not None}
    chat["messages"] = messages_of(request.instructions, request.input)
    if continues(request.input):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning and request.reasoning.effort:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if request.with_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    chat |= _format(request.text) | _tools(request, tools, dialect)
    if request.stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": options}
        if request.with_logprobs and dialect.resource_has_all_logprobs:
            # without it, vLLM omits the logprobs of tokens that add no text
            chat["return_token_ids"] = True
    return chat


def request_tools(request: ResponsesRequest, dialect: Dialect) -> Tools:
    """Return the tools of a Responses request.

    Raises NotTranslated for an unsupported `tool_choice`, and for tools that only the engine's own
    route can handle.
    """
    tools = tools_of(request.tools)
    if dialect.offers_custom_tools and any(tool["type"] == "custom" for tool in tools.repeated):
        raise NotTranslated("a custom tool")
    tools.choice(request.tool_choice)
    return tools


def _format(text: TextConfig | None) -> Json:
    if text is None or text.format is None or isinstance(text.format, ResponseFormatText):
        return {}
    if isinstance(text.format, ResponseFormatJSONObject):
        return {"response_format": {"type": "json_object"}}
    schema = text.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(request: ResponsesRequest, tools: Tools, dialect: Dialect) -> Json:
    if not tools.functions:
        return {}
    chosen: Json = {"tools": tools.functions, "tool_choice": tools.choice(request.tool_choice)}
    if dialect.honours_parallel and request.parallel_tool_calls is False:
        chosen["parallel_tool_calls"] = False
    return chosen
