"""Request schemas of /v1/messages and /v1/messages/count_tokens. They equal vLLM's schemas.

The fields are in vLLM's order, because an error response lists problems in the order of fields. The
classes have vLLM's names, because some error messages quote class names. Unknown fields are
accepted and ignored.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from fakevllm_adapters.formats.base import Json, NotTranslated
from fakevllm_adapters.protocol.errors import WireError, schema_error

BodyT = TypeVar("BodyT", bound=BaseModel)


class MalformedBody(NotTranslated):
    """Error for a request body that vLLM would refuse.

    `error` is the response that vLLM would send. The client gets this response if the engine itself
    has no Messages route.
    """

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message, error)


class AnthropicContentBlock(BaseModel):
    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
    ]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicContentBlock]


class AnthropicTool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class AnthropicToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> AnthropicToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("tool_choice.name is required when type is 'tool'")
        return self


class AnthropicJsonOutputFormat(BaseModel):
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    type: Literal["json_schema"] = "json_schema"


class AnthropicOutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicJsonOutputFormat | None = None


class MessagesBody(BaseModel):
    model: str
    messages: list[AnthropicMessage]
    max_tokens: int
    metadata: dict[str, Any] | None = None
    output_config: AnthropicOutputConfig | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    system: str | list[AnthropicContentBlock] | None = None
    temperature: float | None = None
    tool_choice: AnthropicToolChoice | None = None
    tools: list[AnthropicTool] | None = None
    top_k: int | None = None
    top_p: float | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _has_a_model(cls, model: str) -> str:
        return _require_name(model)

    @field_validator("max_tokens")
    @classmethod
    def _has_room(cls, max_tokens: int) -> int:
        if max_tokens <= 0:
            raise ValueError("max_tokens must be positive")
        return max_tokens


class CountBody(BaseModel):
    model: str
    messages: list[AnthropicMessage]
    system: str | list[AnthropicContentBlock] | None = None
    tool_choice: AnthropicToolChoice | None = None
    tools: list[AnthropicTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _has_a_model(cls, model: str) -> str:
        return _require_name(model)


def parse(schema: type[BodyT], body: Json) -> BodyT:
    """Validate a body, and return it as an instance of `schema`.

    Raises MalformedBody if the body is invalid.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        problems = [
            _without_union_members(dict(problem)) for problem in error.errors(include_url=False)
        ]
        raise MalformedBody(schema_error(problems)) from None


def _without_union_members(problem: Json) -> Json:
    """Return a validation problem in which the location has only keys and indices of the body.

    For a field with a union type, pydantic adds the names of the union's members to the location.
    This function removes the names of the members.
    """
    place = [part for part in problem["loc"] if part != "str" and "list[" not in str(part)]
    return problem | {"loc": place}


def _require_name(model: str) -> str:
    if not model:
        raise ValueError("Model is required")
    return model
