"""The page that lists the commands of both command lines, with their arguments and flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le
from typer.main import get_command

from docs.reference_pages.docstrings import text_of
from docs.reference_pages.fields import range_text, type_text
from docs.reference_pages.markdown import Page, code, prose, section, table
from fakevllm.cli import main as proxy_cli
from fakevllm_server.cli import main as server_cli

INTRODUCTION = """\
This page lists every command of `fakevllm` and `fakevllm-server`, with its arguments and flags. \
[Configuration](../configuration.md) explains them. `--help` after a command prints the same \
texts. `fakevllm --version` and `fakevllm-server --version` print the version."""


def page() -> Page:
    """Return the page with one section per command."""
    sections = [
        part
        for name, app in (("fakevllm", proxy_cli.app), ("fakevllm-server", server_cli.app))
        for part in _sections(name, get_command(app))
    ]
    return Page("Commands", INTRODUCTION, sections)


def _sections(path: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, or those of all commands of a group. The commands of Click
    have no types here, because some versions of typer have a Click of their own."""
    below: dict[str, Any] = getattr(command, "commands", {})
    if not below:
        hints = get_type_hints(command.callback)
        shown = [one for one in command.params if not one.hidden]
        arguments = [one for one in shown if one.param_type_name == "argument"]
        flags = [one for one in shown if one.param_type_name == "option"]
        yield section(
            code(path),
            prose(text_of(command.help)),
            _arguments(arguments, hints),
            _flags(flags, hints),
        )
    for name in sorted(below):
        if not below[name].hidden:
            yield from _sections(f"{path} {name}", below[name])


def _arguments(parameters: list[Any], hints: Mapping[str, Any]) -> str:
    rows = [
        [code(one.name.upper()), _value(one, hints), _default(one), _meaning(one)]
        for one in parameters
    ]
    return table(["argument", "value", "default", "meaning"], rows) if rows else ""


def _flags(parameters: list[Any], hints: Mapping[str, Any]) -> str:
    rows = [
        [
            ", ".join(code(name) for name in (*one.opts, *one.secondary_opts)),
            _value(one, hints),
            _default(one),
            code(one.envvar) if isinstance(one.envvar, str) else "",
            _meaning(one),
        ]
        for one in parameters
    ]
    head = ["flag", "value", "default", "environment variable", "meaning"]
    return table(head, rows) if rows else "This command has no flags."


def _value(parameter: Any, hints: Mapping[str, Any]) -> str:
    """Return the type of a parameter's value; empty for a flag without a value."""
    if getattr(parameter, "is_flag", False):
        return ""
    hint = hints[parameter.name]
    repeated = next((one for one in (hint, *get_args(hint)) if get_origin(one) is list), None)
    if repeated is not None:
        return f"{type_text(*get_args(repeated))}; may be repeated"
    plain = type_text(hint).replace('"', "")  # values of flags are written without quotes
    return ", ".join(filter(None, (plain, range_text(_limits(parameter)))))


def _limits(parameter: Any) -> list[Ge | Le]:
    """Return the limits of a number. They are in the parameter's type, and since typer 0.29 in the
    parameter itself."""
    holder = parameter if hasattr(parameter, "min") else parameter.type
    low, high = getattr(holder, "min", None), getattr(holder, "max", None)
    limits: list[Ge | Le] = [] if low is None else [Ge(low)]
    return limits if high is None else [*limits, Le(high)]


def _meaning(parameter: Any) -> str:
    if not parameter.help:
        raise ValueError(f"{parameter.opts[0]} has no help text: write one in its typer.Option")
    return prose(parameter.help)


def _default(parameter: Any) -> str:
    """Return the default; empty if the parameter is absent by default."""
    if parameter.required:
        return "required"
    value = parameter.default() if callable(parameter.default) else parameter.default
    if value is None or value is False or value == [] or value == ():
        return ""
    value = getattr(value, "value", value)
    return code(value if isinstance(value, str | Path) else json.dumps(value, default=str))
