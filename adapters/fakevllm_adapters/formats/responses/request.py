"""A Responses request: its fields as vLLM types them, and the chat request that asks the same.

The chat request holds what vLLM itself makes of the fields: what it ignores at /v1/responses is not
passed on, even where /v1/chat/completions would honour it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fakevllm_adapters.formats.base import Json, Untranslated
from fakevllm_adapters.formats.responses.dialect import Dialect
from fakevllm_adapters.formats.responses.input import Input, continues, messages_of
from fakevllm_adapters.formats.responses.tools import Tools, tools_of

PASSED_ON = (
    *("model", "temperature", "top_p", "top_k", "logit_bias", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output"),
    *("skip_special_tokens", "structured_outputs", "chat_template_kwargs", "include_reasoning"),
    *("priority", "cache_salt", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"),
    *("kv_transfer_params", "ec_transfer_params"),
)
"""Fields that mean the same in both formats."""
PASSED_ON_NEW = ("min_p", "stop_token_ids", "spaces_between_special_tokens", "session_id")
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


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Reasoning(Open):
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    generate_summary: Level | None = None
    mode: str | None = None
    summary: Level | None = None


class PlainFormat(Open):
    type: Literal["text", "json_object"]


class SchemaFormat(Open):
    name: str
    schema_: dict[str, object] = Field(alias="schema")
    type: Literal["json_schema"]
    description: str | None = None
    strict: bool | None = None


class Text(Open):
    format: PlainFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class PromptCacheOptions(BaseModel):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | None = None


class ResponsesRequest(BaseModel):
    """The fields that are repeated in the answer or decide its form, and those of the passed on
    ones that vLLM takes no null for."""

    input: Input
    background: bool = False
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    include: list[Include] | None = None
    include_reasoning: bool = True
    include_stop_str_in_output: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = True
    presence_penalty: float | None = None
    priority: int = 0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    reasoning: Reasoning | None = None
    request_id: str = ""
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: Text | None = None
    tools: list[Any] = Field(default_factory=list[Any])
    tool_choice: Any = "auto"
    top_logprobs: int | None = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) and self.top_logprobs is not None


def parse_request(body: Json) -> ResponsesRequest:
    """Raises Untranslated where vLLM would refuse, or do what the chat format cannot."""
    for name in ("background", "prompt", "enable_response_messages", "previous_input_messages"):
        if body.get(name):
            raise Untranslated(name)
    try:
        asked = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        # By name only: values are the app's own.
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        names = {str(problem["loc"][0]) for problem in problems}
        raise Untranslated(f"the value of {', '.join(sorted(names))}") from None
    if body.get("structured_outputs") is not None and asked.text and asked.text.format:
        raise Untranslated("structured_outputs and text.format together")
    return asked


def chat_request(asked: ResponsesRequest, body: Json, tools: Tools, dialect: Dialect) -> Json:
    """Raises Untranslated."""
    names = PASSED_ON + (PASSED_ON_NEW if dialect.has_prompt_cache_fields else ())
    chat = {name: body[name] for name in names if body.get(name) is not None}
    chat["messages"] = messages_of(asked.instructions, asked.input)
    if continues(asked.input):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if asked.max_output_tokens is not None:
        chat["max_completion_tokens"] = asked.max_output_tokens
    if asked.reasoning and asked.reasoning.effort:
        chat["reasoning_effort"] = asked.reasoning.effort
    if asked.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if asked.with_logprobs:
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    chat |= _format(asked.text) | _tools(asked, tools, dialect)
    if asked.stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": options}
        if asked.with_logprobs and dialect.tells_all_logprobs:
            chat["return_token_ids"] = True  # else logprobs of tokens that show nothing do not come
    return chat


def request_tools(asked: ResponsesRequest, dialect: Dialect) -> Tools:
    """Raises Untranslated."""
    tools = tools_of(asked.tools)
    if dialect.calls_custom_tools and any(tool["type"] == "custom" for tool in tools.repeated):
        raise Untranslated("a custom tool")
    tools.choice(asked.tool_choice)
    return tools


def _format(text: Text | None) -> Json:
    if text is None or text.format is None or text.format.type == "text":
        return {}
    if isinstance(text.format, PlainFormat):
        return {"response_format": {"type": "json_object"}}
    schema = text.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(asked: ResponsesRequest, tools: Tools, dialect: Dialect) -> Json:
    if not tools.functions:
        return {}
    chosen: Json = {"tools": tools.functions, "tool_choice": tools.choice(asked.tool_choice)}
    if dialect.honours_parallel and asked.parallel_tool_calls is False:
        chosen["parallel_tool_calls"] = False
    return chosen
