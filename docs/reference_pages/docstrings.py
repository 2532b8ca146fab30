"""Docstrings of fields, enum members and constants, read from the source code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from types import ModuleType


def cleaned(docstring: str | None) -> str:
    """Return a docstring without its indentation."""
    return inspect.cleandoc(docstring or "")


def text_of(docstring: str | None) -> str:
    """Return a docstring as one line. A paragraph that begins with an example is left out.
    The items of a list begin with a bullet.

    >>> text_of("Seconds a hook\\n    may take.\\n\\n    >>> 1 + 1\\n    2")
    'Seconds a hook may take.'
    """
    text = re.sub(r"^\* ", "• ", cleaned(docstring), flags=re.MULTILINE)
    paragraphs = text.split("\n\n")
    return " ".join(" ".join(part.split()) for part in paragraphs if not part.startswith(">>>"))


def of_class(owner: type) -> dict[str, str]:
    """Return the docstrings of the fields or enum members of a class, by name. Fields of its base
    classes are included."""
    docstrings: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.partition(".")[0].startswith("fakevllm"):
            [statement] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(statement, ast.ClassDef)
            docstrings |= _after_names(statement.body)
    return docstrings


def of_module(module: ModuleType) -> dict[str, str]:
    """Return the docstrings of the constants of a module, by name."""
    return _after_names(ast.parse(inspect.getsource(module)).body)


def _after_names(statements: Iterable[ast.stmt]) -> dict[str, str]:
    """Return the string below each assignment, by the name that is assigned."""
    docstrings: dict[str, str] = {}
    name = None
    for statement in statements:
        match statement:
            case ast.Expr(ast.Constant(str(text))) if name is not None:
                docstrings[name] = text_of(text)
                name = None
            case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                pass
            case _:
                name = None
    return docstrings
