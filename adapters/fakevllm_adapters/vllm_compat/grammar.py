"""What a request holds its answer to: from response_format, structured_outputs or a forced tool
to one grammar, read the way vLLM reads them. Pure; whether a grammar is sound, the engine says.
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
    """What the whole answer must be.

    >>> Grammar("choice", '["yes", "no"]').kind
    'choice'
    """

    kind: Kind
    """`calls`: a JSON array of {name, parameters}, one for each call of a tool; `arguments`: the
    arguments of the one tool asked for by name."""
    text: str
    """A JSON schema for json, calls and arguments; a JSON list of strings for choice; JSON for
    structural_tag; else the expression itself."""
    any_whitespace: bool = True
    """JSON may hold more white space than one space after each comma and colon."""


_LOOSE = ConfigDict(extra="allow")
"""Unknown fields are accepted, as vLLM does."""


@with_config(_LOOSE)
class JsonSchemaResponseFormat(TypedDict):
    name: str
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(_LOOSE)
class ResponseFormat(TypedDict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NotRequired[JsonSchemaResponseFormat | None]


@with_config(_LOOSE)
class StructuralTagResponseFormat(TypedDict):
    type: Literal["structural_tag"]
    format: Any


@with_config(_LOOSE)
class LegacyStructuralTag(TypedDict):
    begin: str
    schema: NotRequired[dict[str, Any] | None]
    end: str


@with_config(_LOOSE)
class LegacyStructuralTagResponseFormat(TypedDict):
    type: Literal["structural_tag"]
    structures: list[LegacyStructuralTag]
    triggers: list[str]


AnyResponseFormat = ResponseFormat | StructuralTagResponseFormat | LegacyStructuralTagResponseFormat


class StructuredOutputs(TypedDict):
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
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(_LOOSE)
class Tool(TypedDict):
    type: NotRequired[Literal["function"]]
    function: FunctionDefinition


def grammar_of(
    structured: Mapping[str, Any] | None, format: Mapping[str, Any] | None
) -> Grammar | None:
    """Raises WireError (400). A response_format takes the place of the same kind of constraint."""
    asked = dict(structured or {}) | _constraint_of(format)
    if structured is None and (format is None or format["type"] == "text"):
        return None
    given = [name for name in _CONSTRAINTS if asked.get(name) is not None]
    if len(given) > 1:
        raise bad_request(
            "You can only use one kind of structured outputs constraint but multiple are "
            f"specified: {asked}"
        )
    if not given:
        raise bad_request(
            "You must use one kind of structured outputs constraint but none are specified: "
            f"{asked}"
        )
    any_whitespace = not asked.get("disable_any_whitespace")
    return _grammar(given[0], asked[given[0]], any_whitespace)


def _constraint_of(format: Mapping[str, Any] | None) -> Json:
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


def _grammar(constraint: str, asked: Any, any_whitespace: bool) -> Grammar:
    match constraint:
        case "json":
            return Grammar("json", _schema_text(asked), any_whitespace)
        case "json_object":
            if asked is False:
                raise bad_request(
                    "structured_outputs.json_object must be True if set; omit structured_outputs "
                    "to disable structured outputs"
                )
            return Grammar("json", json.dumps(ANY_OBJECT), any_whitespace)
        case "choice":
            if not asked:
                raise bad_request(f"Choice '{asked}' cannot be an empty list")
            return Grammar("choice", json.dumps(asked))
        case "grammar":
            if not asked.strip():
                raise bad_request("structured_outputs.grammar cannot be an empty string")
            return Grammar("ebnf", asked)
        case "regex":
            return Grammar("regex", asked)
        case _:
            return Grammar("structural_tag", asked)


def _schema_text(asked: str | Json) -> str:
    if not isinstance(asked, str):
        return json.dumps(asked)
    if not asked.strip():
        raise bad_request("structured_outputs.json cannot be an empty string")
    try:
        json.loads(asked)
    except (ValueError, RecursionError):
        raise bad_request("Invalid JSON grammar specification.") from None
    return asked


def calls_grammar(tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
    """At least one call of the offered tools: `tool_choice` "required". Raises WireError (400).
    Where calls are not to be parallel, the first is the only one told, so no other is sampled."""
    schema: Json = {"type": "array", "minItems": 1, "items": {"anyOf": list(map(_call, tools))}}
    if not is_parallel:
        schema["maxItems"] = 1
    definitions = _shared_definitions(tools)
    if definitions:
        schema["$defs"] = definitions
    return Grammar("calls", json.dumps(schema), any_whitespace=False)


def arguments_grammar(tool: Tool) -> Grammar:
    schema = tool["function"].get("parameters") or ANY_OBJECT
    return Grammar("arguments", json.dumps(schema), any_whitespace=False)


def _call(tool: Tool) -> Json:
    function = tool["function"]
    given = function.get("parameters") or {"type": "object", "properties": {}}
    parameters = {key: value for key, value in given.items() if key != "$defs"}
    properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": ["name", "parameters"]}


def _shared_definitions(tools: Sequence[Tool]) -> Json:
    """`#/$defs/…` counts from the root of the schema, which is now ours."""
    shared: Json = {}
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        for name, schema in cast(Json, parameters.get("$defs") or {}).items():
            if shared.setdefault(name, schema) != schema:
                raise _conflict(name)
    return shared


def _conflict(name: str) -> WireError:
    return bad_request(f"Tool definition '{name}' has multiple schemas, which is not supported.")
