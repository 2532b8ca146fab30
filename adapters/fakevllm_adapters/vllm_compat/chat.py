"""/v1/chat/completions from the engine's side: vLLM's request schema.

Used by the engines that are not vLLM themselves. Every field that one of them honours is here;
`vllm_checks` refuses by name what none of them can.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import Json, WireError, bad_request, schema_error
from fakevllm_adapters.vllm_compat.checks import MAX_STOP_STRINGS, check, check_before_types
from fakevllm_adapters.vllm_compat.grammar import (
    AnyResponseFormat,
    Grammar,
    StructuredOutputs,
    Tool,
    arguments_grammar,
    calls_grammar,
    grammar_of,
)

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_Stops = Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)]


@with_config(ConfigDict(extra="allow"))
class StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]
    continuous_usage_stats: NotRequired[bool | None]


class ChatRequest(BaseModel):
    """The fields our own engines honour; the others are accepted as vLLM accepts them, or refused
    by name."""

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
    """Ours alone: vLLM has no such field, and whatever an app sends by that name is none of it."""
    request_id: str | None = None

    @property
    def limit(self) -> int | None:
        """Asked-for number of new tokens."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def usage_all_along(self) -> bool:
        """vLLM tells the usage so far in every chunk only beside the one at the end."""
        options = self.stream_options or {}
        return self.include_usage and bool(options.get("continuous_usage_stats"))

    @property
    def reports_allowed(self) -> bool:
        """Whether each token comes with the set it was chosen from."""
        return self.return_allowed_tokens is True

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        if not isinstance(self.tool_choice, dict):
            return None
        return self.tool_choice["function"]["name"]

    @property
    def grammar(self) -> Grammar | None:
        """A forced tool takes the place of every other grammar, as it does in vLLM. Raises
        WireError (400)."""
        if self.tools and self.tool_choice == "required":
            return calls_grammar(self.tools, is_parallel=bool(self.parallel_tool_calls))
        if self.tools and (name := self.named_tool) is not None:
            return arguments_grammar(
                next(tool for tool in self.tools if tool["function"]["name"] == name)
            )
        return grammar_of(self.structured_outputs, self.response_format)


def parse_chat_request(raw: bytes) -> ChatRequest:
    """Raises WireError, worded as vLLM words it."""
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
    """vLLM's 400 for a body whose fields are of other types."""
    problems: list[Any] = list(error.errors(include_url=False))
    return schema_error([_shown(dict(problem)) for problem in problems])


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict"})


def _shown(problem: Json) -> Json:
    """Which branch of a union did not fit is pydantic's word, not a place in the body."""
    place = [part for part in problem["loc"] if part not in _TYPE_NAMES and "[" not in str(part)]
    return problem | {"loc": tuple(place)}


def check_length(prompt_tokens: int, limit: int | None, max_model_len: int) -> int:
    """How many tokens may be generated. Raises WireError where vLLM answers 400."""
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
    room = max_model_len - prompt_tokens
    return room if limit is None else min(limit, room)


def truncated(prompt_ids: list[int], request: ChatRequest, max_model_len: int) -> list[int]:
    """The prompt cut to `truncate_prompt_tokens`, its end kept unless `truncation_side` says
    otherwise. Raises WireError where vLLM answers 400."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return prompt_ids
    room = max_model_len - (request.limit or 0)
    if asked > room >= 0:
        raise bad_request(
            f"truncate_prompt_tokens={asked} cannot be greater than max_model_len - max_tokens = "
            f"{room}. Please request a smaller truncation size.",
            "truncate_prompt_tokens",
            asked,
        )
    length = room if asked < 0 else asked
    if length >= len(prompt_ids):
        return prompt_ids
    if request.truncation_side == "right":
        return prompt_ids[:length]
    return prompt_ids[len(prompt_ids) - max(length, 0) :]
