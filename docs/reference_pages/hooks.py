"""The page that lists the hook contract: the three functions, and the objects that they get."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from docs.reference_pages import docstrings
from docs.reference_pages.markdown import Page, code, prose, section, table
from fakevllm.hooks import spec

INTRODUCTION = """\
This page lists the functions that a hook file may define, and the fields of the objects that they \
get. [The hooks](../../fakevllm/hooks/README.md) explains how hooks are found and run, \
[Ready reward hooks](../../reward_hooks/README.md) are hooks to copy, and \
[States and reasons](codes.md#reasons-of-hooks) lists how hooks can fail. Import the types from \
`fakevllm.hooks.spec`."""
_FUNCTIONS: Sequence[Callable[..., Any]] = (
    spec.on_compute_relative_reward,
    spec.on_user_submit_new_requests,
    spec.on_feedback,
)
_OBJECTS: Sequence[type] = (spec.Sibling, spec.Feedback, spec.Task)


def page() -> Page:
    """Return the page with one section per function and one per object."""
    sections = [*map(_function, _FUNCTIONS), *map(_object, _OBJECTS)]
    return Page("The hook contract", INTRODUCTION, sections)


def _function(function: Callable[..., Any]) -> str:
    [definition] = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef) and definition.returns is not None
    arguments = ",\n".join(f"    {one}" for one in ast.unparse(definition.args).split(", "))
    signature = f"def {definition.name}(\n{arguments},\n) -> {ast.unparse(definition.returns)}"
    return section(
        code(definition.name),
        f"```python\n{signature}\n```",
        inspect.cleandoc(function.__doc__ or ""),
    )


def _object(owner: type) -> str:
    [definition] = ast.parse(inspect.getsource(owner)).body
    assert isinstance(definition, ast.ClassDef)
    meanings = docstrings.of_class(owner)
    rows = [
        [
            code(statement.target.id),
            " or ".join(map(code, ast.unparse(statement.annotation).split(" | "))),
            "" if statement.value is None else "yes",
            prose(meanings[statement.target.id]),
        ]
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    meaning = prose(docstrings.text_of(owner.__doc__))
    return section(
        code(owner.__name__), meaning, table(["field", "type", "has a default", "meaning"], rows)
    )
