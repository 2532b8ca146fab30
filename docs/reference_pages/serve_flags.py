"""The flags of `fakevllm serve` that set keys of fakevllm.toml, read from the command's code."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from typer.main import get_command

from fakevllm.cli import main


@cache
def serve_flags() -> dict[str, str]:
    """Return the flag of `fakevllm serve` for each configuration key that has one.

    >>> serve_flags()["proxy.port"], serve_flags()["job.num_repeat"]
    ('--port', '--n')
    """
    flags = _flags_by_parameter(get_command(main.app))
    return {key: flags[parameter] for key, parameter in _parameters()}


def _flags_by_parameter(app: Any) -> dict[str, str]:
    return {one.name: one.opts[0] for one in app.commands["serve"].params}


def _parameters() -> Iterator[tuple[str, str]]:
    """Yield each configuration key with the parameter of `serve` that sets it. The function assigns
    a dict to its variable `flags`, with one dict of keys and values per section."""
    code = ast.parse(textwrap.dedent(inspect.getsource(main.serve)))
    [sections] = [
        node.value
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "flags"
    ]
    for section, keys in _entries(sections):
        for key, value in _entries(keys):
            [parameter] = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
            yield f"{section}.{key}", parameter


def _entries(table: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    assert isinstance(table, ast.Dict)
    for name, value in zip(table.keys, table.values, strict=True):
        assert isinstance(name, ast.Constant) and isinstance(name.value, str)
        yield name.value, value
