"""The tools of a Responses request: translated to functions for the model, and repeated in the
response.

The model can only call functions. Tools that a hosted service would run, such as web search, are
repeated in the response and otherwise ignored, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from fakevllm_adapters.formats.base import Json, NotTranslated
from fakevllm_adapters.formats.responses.input import NAMESPACE_SEPARATOR
from fakevllm_adapters.protocol.errors import schema_error

_CALLED_BY = ("allowed_callers", "async", "defer_loading", "description")
_WEB_SEARCH = ("type", "external_web_access", "filters", "search_context_size", "user_location")
_WEB_PREVIEW = ("type", "search_content_types", "search_context_size", "user_location")
_COMPUTER = ("display_height", "display_width", "environment", "type")

KEYS: dict[str, tuple[str, ...]] = {
    "function": ("name", "parameters", "strict", "type", *_CALLED_BY, "output_schema"),
    "custom": ("name", "type", *_CALLED_BY, "format"),
    "namespace": ("description", "name", "tools", "type"),
    "web_search": _WEB_SEARCH,
    "web_search_2025_08_26": _WEB_SEARCH,
    "web_search_preview": _WEB_PREVIEW,
    "web_search_preview_2025_03_11": _WEB_PREVIEW,
    "file_search": ("type", "vector_store_ids", "filters", "max_num_results", "ranking_options"),
    "computer": ("type",),
    "computer_use_preview": _COMPUTER,
    "mcp": (
        *("server_label", "type", "allowed_callers", "allowed_tools", "authorization"),
        *("connector_id", "defer_loading", "headers", "require_approval", "server_description"),
        *("server_url", "tunnel_id"),
    ),
    "code_interpreter": ("container", "type", "allowed_callers"),
    "programmatic_tool_calling": ("type",),
    "image_generation": (
        *("type", "action", "background", "complexity", "frame_count", "frame_duration_ms"),
        *("input_fidelity", "input_image_mask", "model", "moderation", "output_compression"),
        *("output_format", "partial_images", "quality", "size", "svg"),
    ),
    "local_shell": ("type",),
    "shell": ("type", "allowed_callers", "environment"),
    "tool_search": ("type", "description", "execution", "parameters"),
    "apply_patch": ("type", "allowed_callers"),
}
"""Maps each type of tool to the keys that a tool of this type has in the response. The keys are the
fields of the types of the Python package openai 3.52, which vLLM serializes. Keys that the request
does not set are null."""
_WITHIN_NAMESPACE = ("name", "type", *_CALLED_BY, "output_schema", "parameters", "strict")
_LOCATION = ("city", "country", "region", "timezone", "type")
_REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "function": {"name": str, "parameters": (dict, type(None))},
    "custom": {"name": str},
    "namespace": {"name": str, "description": str, "tools": list},
    "mcp": {"server_label": str},
    "code_interpreter": {"container": (str, dict)},
    "file_search": {"vector_store_ids": list},
}
_CLASS_NAMES = {
    "function": "FunctionTool",
    "custom": "CustomTool",
    "namespace": "NamespaceTool",
    "mcp": "Mcp",
    "code_interpreter": "CodeInterpreter",
    "file_search": "FileSearchTool",
}
"""Names of vLLM's classes, by type of tool. vLLM's error messages quote these names."""
_TYPE_NAMES: dict[type, tuple[str, str]] = {
    str: ("string_type", "string"),
    dict: ("dict_type", "dictionary"),
    list: ("list_type", "list"),
}
"""For each type, two texts that pydantic uses in the error about a value of another type: the name
of the problem, and the name of the type that the value should have."""
_TAKEN = ("name", "description", "parameters", "strict", "defer_loading")


@dataclass(frozen=True, slots=True)
class CallName:
    """The name and the namespace of a called function, as they appear in the response."""

    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request in two forms: in the format of chat completions, and as the response
    repeats them.

    >>> tools_of([{"type": "function", "name": "look"}, {"type": "web_search"}]).functions
    [{'type': 'function', 'function': {'name': 'look'}}]
    """

    functions: list[Json]
    """Functions in the format of chat completions."""
    repeated: list[Json]
    """All tools as the response repeats them."""
    _names: dict[str, CallName] = field(default_factory=dict[str, CallName])

    def call_name(self, name: str) -> CallName:
        """Return the name and the namespace of a called function, as they appear in the response.

        `name` is the function's name in the chat completion. If the function is in a namespace,
        this name includes the namespace.
        """
        return self._names.get(name, CallName(name))

    def choice(self, tool_choice: object) -> object:
        """Translate the request's `tool_choice` to the format of chat completions.

        Raises NotTranslated if the choice names an unknown function or has an unsupported form.
        """
        if isinstance(tool_choice, dict) and cast(Json, tool_choice).get("type") == "function":
            name = cast(Json, tool_choice).get("name")
            if any(tool["function"]["name"] == name for tool in self.functions):
                return {"type": "function", "function": {"name": name}}
        elif tool_choice in ("auto", "none") or (tool_choice == "required" and self.functions):
            return cast(object, tool_choice)
        reason = f"tool_choice {tool_choice!r}"
        if isinstance(tool_choice, dict) and cast(Json, tool_choice):
            raise NotTranslated(reason)
        expected = "'none', 'auto' or 'required'"
        problem: Json = {"type": "literal_error", "loc": ("tool_choice",)}
        problem |= {"msg": f"Input should be {expected}", "input": tool_choice}
        problem |= {"ctx": {"expected": expected}}
        raise NotTranslated(reason, schema_error([problem]))

    def repeated_choice(self, tool_choice: object) -> object:
        """Return the response's field `tool_choice`: the choice in the request, or `none` if the
        response has no tools."""
        if isinstance(tool_choice, dict):
            return {"name": cast(Json, tool_choice)["name"], "type": "function"}
        return tool_choice if self.repeated else "none"


def tools_of(tools: list[Any]) -> Tools:
    """Parse the tools of a request.

    Raises NotTranslated for a tool of an unknown type or without a required field.
    """
    functions: list[Json] = []
    names: dict[str, CallName] = {}
    for tool in tools:
        for function, namespace in _functions_of(tool):
            name = function["name"]
            flat = f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace is not None else name
            taken = {key: function[key] for key in _TAKEN if function.get(key) is not None}
            functions.append({"type": "function", "function": taken | {"name": flat}})
            if namespace is not None:
                names[flat] = CallName(name, namespace)
    return Tools(functions, [_repeated(tool) for tool in tools], names)


def tool_problems(tools: list[Any]) -> list[Json]:
    """Return the problems in a list of tools: missing fields, and fields of wrong types.

    The problems have the form of pydantic's `errors()`. vLLM compares a tool with every type of
    tool, and reports the problems for each type. This function reports only the problems for the
    type that the tool names. If the tool names no known type, the function reports the problems for
    the type `function`.
    """
    return [problem for index, tool in enumerate(tools) for problem in _problems(index, tool)]


def _problems(index: int, tool: object) -> Iterator[Json]:
    place = ("tools", index)
    if not isinstance(tool, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        of_function = (*place, _CLASS_NAMES["function"])
        yield {"type": "model_attributes_type", "loc": of_function, "msg": message, "input": tool}
        return
    checked = cast(Json, tool)
    named: object = checked.get("type")
    kind = named if isinstance(named, str) and named in KEYS else "function"
    place = (*place, _CLASS_NAMES.get(kind, kind))
    for key, kinds in _REQUIRED.get(kind, {}).items():
        if isinstance(checked.get(key), kinds):
            continue
        if key not in checked:
            yield _missing((*place, key), checked)
        else:
            yield _mistyped((*place, key), checked[key], kinds)
    if "type" not in checked:
        yield _missing((*place, "type"), checked)
    elif kind != named:
        problem: Json = {"type": "literal_error", "loc": (*place, "type")}
        problem |= {"msg": "Input should be 'function'", "input": named}
        yield problem | {"ctx": {"expected": "'function'"}}


def _missing(place: tuple[object, ...], value: object) -> Json:
    return {"type": "missing", "loc": place, "msg": "Field required", "input": value}


def _mistyped(place: tuple[object, ...], value: object, kinds: type | tuple[type, ...]) -> Json:
    kind = kinds[0] if isinstance(kinds, tuple) else kinds
    problem, noun = _TYPE_NAMES[kind]
    message = f"Input should be a valid {noun}"
    return {"type": problem, "loc": place, "msg": message, "input": value}


def _functions_of(tool: object) -> Iterator[tuple[Json, str | None]]:
    """Yield a pair (function, namespace) for each function of a tool.

    A tool is a single function or a namespace of functions. The second element is the name of the
    namespace, or None for a single function.
    """
    checked = _checked(tool)
    if checked["type"] == "function":
        yield checked, None
    if checked["type"] == "namespace":
        for inner in checked["tools"]:
            if _checked(inner)["type"] == "function":
                yield inner, checked["name"]


def _checked(tool: object) -> Json:
    kind = cast(Json, tool).get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise NotTranslated(f"a tool of type {kind!r}")
    checked = cast(Json, tool)
    for key, kinds in _REQUIRED.get(kind, {}).items():
        if not isinstance(checked.get(key), kinds):
            raise NotTranslated(f"a tool of type {kind!r} without {key}")
    return checked


def _repeated(tool: Json, within_namespace: bool = False) -> Json:
    is_function = tool["type"] == "function"
    keys = _WITHIN_NAMESPACE if within_namespace and is_function else KEYS[tool["type"]]
    repeated = {key: tool.get(key) for key in keys} | tool
    if tool["type"] == "namespace":
        repeated["tools"] = [_repeated(inner, within_namespace=True) for inner in tool["tools"]]
    location = repeated.get("user_location")
    if isinstance(location, dict):
        repeated["user_location"] = dict.fromkeys(_LOCATION) | cast(Json, location)
    return repeated
