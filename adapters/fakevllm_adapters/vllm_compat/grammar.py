"""Grammars for constrained answers. A grammar comes from the request field `response_format`, from
`structured_outputs`, or from a tool call that `tool_choice` forces.

The fields have the same meaning as in vLLM. The functions do no I/O and compile no grammar. Only
the engine can tell whether a grammar compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from fakevllm_adapters.protocol.errors import Json, WireError, bad_request

Kind = Literal["json", "calls", "arguments", "choice", "regex", "ebnf", "structural_tag"]

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
ANY_OBJECT: Json = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole answer must match.

    >>> Grammar("choice", '["yes", "no"]').kind
    'choice'
    """

    kind: Kind
    """Kind of the grammar. With `calls`, the answer is a JSON array with one {name, parameters} for
    each tool call. With `arguments`, the answer is a JSON object with the arguments of the tool
    that `tool_choice` names."""
    text: str
    """Text of the grammar: a JSON schema for json, calls and arguments; a JSON list of strings for
    choice; JSON for structural_tag; the expression itself for regex and ebnf."""
    any_whitespace: bool = True
    """Whether JSON in the answer may have any whitespace. If False, it has one space after each
    comma and colon, and no other."""


_LOOSE = ConfigDict(extra="allow")
"""Unknown fields are accepted, as in vLLM."""


@with_config(_LOOSE)
class JsonSchemaResponseFormat(TypedDict):
    """The field `json_schema` of a `response_format`."""

    name: str
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(_LOOSE)
class ResponseFormat(TypedDict):
    """The value of `response_format` in the form of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NotRequired[JsonSchemaResponseFormat | None]


@with_config(_LOOSE)
class StructuralTagResponseFormat(TypedDict):
    """The value of `response_format` in vLLM's form for structural tags."""

    type: Literal["structural_tag"]
    format: Any


@with_config(_LOOSE)
class LegacyStructuralTag(TypedDict):
    """One entry of `structures` in vLLM's older form of `response_format` for structural tags."""

    begin: str
    schema: NotRequired[dict[str, Any] | None]
    end: str


@with_config(_LOOSE)
class LegacyStructuralTagResponseFormat(TypedDict):
    """The value of `response_format` in vLLM's older form for structural tags."""

    type: Literal["structural_tag"]
    structures: list[LegacyStructuralTag]
    triggers: list[str]


AnyResponseFormat = ResponseFormat | StructuralTagResponseFormat | LegacyStructuralTagResponseFormat


class StructuredOutputs(TypedDict):
    """The value of `structured_outputs`, with vLLM's fields."""

    json: NotRequired[str | dict[str, Any] | None]
    regex: NotRequired[str | None]
    choice: NotRequired[list[str] | None]
    grammar: NotRequired[str | None]
    json_object: NotRequired[bool | None]
    structural_tag: NotRequired[str | None]
    disable_any_whitespace: NotRequired[bool]
    disable_additional_properties: NotRequired[bool]
    whitespace_pattern: NotRequired[str | None]


@with_config(_LOOSE)
class FunctionDefinition(TypedDict):
    """The field `function` of a tool, which describes the function."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(_LOOSE)
class Tool(TypedDict):
    """One entry of the request field `tools`."""

    type: NotRequired[Literal["function"]]
    function: FunctionDefinition


def parse_grammar(
    structured: Mapping[str, Any] | None, format: Mapping[str, Any] | None
) -> Grammar | None:
    """Return the grammar that the request fields `structured_outputs` and `response_format` define.

    Return None if the request has no `structured_outputs`, and its `response_format` is missing or
    plain text. In all other cases, the two fields together must define exactly one kind of
    constraint. Otherwise WireError (400) is raised. WireError (400) is also raised if the JSON
    schema, list of choices or EBNF grammar is empty. If both fields define a constraint of the same
    kind, `response_format` wins.
    """
    constraints = dict(structured or {}) | _format_constraint(format)
    if structured is None and (format is None or format["type"] == "text"):
        return None
    kinds = [name for name in _CONSTRAINTS if constraints.get(name) is not None]
    if len(kinds) > 1:
        raise bad_request(
            "You can only use one kind of structured outputs constraint but multiple are "
            f"specified: {constraints}"
        )
    if not kinds:
        raise bad_request(
            "You must use one kind of structured outputs constraint but none are specified: "
            f"{constraints}"
        )
    any_whitespace = not constraints.get("disable_any_whitespace")
    return _build_grammar(kinds[0], constraints[kinds[0]], any_whitespace)


def _format_constraint(format: Mapping[str, Any] | None) -> Json:
    """Translate a `response_format` to the equivalent fields of `structured_outputs`.

    Return {} if the format does not constrain the answer.
    """
    match format and format["type"]:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            assert format is not None
            return {"json": cast(Json, format.get("json_schema") or {}).get("schema")}
        case "structural_tag":
            return {"structural_tag": json.dumps(format)}
        case _:
            return {}


def _build_grammar(kind: str, value: Any, any_whitespace: bool) -> Grammar:
    match kind:
        case "json":
            return Grammar("json", _schema_text(value), any_whitespace)
        case "json_object":
            if value is False:
                raise bad_request(
                    "structured_outputs.json_object must be True if set; omit structured_outputs "
                    "to disable structured outputs"
                )
            return Grammar("json", json.dumps(ANY_OBJECT), any_whitespace)
        case "choice":
            if not value:
                raise bad_request(f"Choice '{value}' cannot be an empty list")
            return Grammar("choice", json.dumps(value))
        case "grammar":
            if not value.strip():
                raise bad_request("structured_outputs.grammar cannot be an empty string")
            return Grammar("ebnf", value)
        case "regex":
            return Grammar("regex", value)
        case _:
            return Grammar("structural_tag", value)


def _schema_text(schema: str | Json) -> str:
    if not isinstance(schema, str):
        return json.dumps(schema)
    if not schema.strip():
        raise bad_request("structured_outputs.json cannot be an empty string")
    try:
        json.loads(schema)
    except (ValueError, RecursionError):
        raise bad_request("Invalid JSON grammar specification.") from None
    return schema


def calls_grammar(tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
    """Return the grammar for `tool_choice` "required". An answer that matches the grammar contains
    at least one tool call.

    If the request does not allow parallel calls, the grammar allows only one call. The app would
    get only the first call anyway.

    Raises WireError (400) if two tools define the same name in `$defs` differently.
    """
    schema: Json = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": list(map(_call_schema, tools))},
    }
    if not is_parallel:
        schema["maxItems"] = 1
    definitions = _shared_definitions(tools)
    if definitions:
        schema["$defs"] = definitions
    return Grammar("calls", json.dumps(schema), any_whitespace=False)


def arguments_grammar(tool: Tool) -> Grammar:
    """Return the grammar that the arguments of a call of this tool must match."""
    schema = tool["function"].get("parameters") or ANY_OBJECT
    return Grammar("arguments", json.dumps(schema), any_whitespace=False)


def _call_schema(tool: Tool) -> Json:
    function = tool["function"]
    own_schema = function.get("parameters") or {"type": "object", "properties": {}}
    parameters = {key: value for key, value in own_schema.items() if key != "$defs"}
    properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": ["name", "parameters"]}


def _shared_definitions(tools: Sequence[Tool]) -> Json:
    """Return the merged `$defs` (named definitions) of the JSON schemas of all tools.

    The caller puts the definitions at the root of the schema for the array of calls, because
    references such as `#/$defs/…` start at the root of a schema.
    """
    shared: Json = {}
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        for name, schema in cast(Json, parameters.get("$defs") or {}).items():
            if shared.setdefault(name, schema) != schema:
                raise _conflict(name)
    return shared


def _conflict(name: str) -> WireError:
    return bad_request(f"Tool definition '{name}' has multiple schemas, which is not supported.")
