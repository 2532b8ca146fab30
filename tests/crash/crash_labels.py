"""The labels of all crash points, read from the server's source.

Because they are read from the source, no new crash point can be left untested."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fakevllm_server

SOURCE = Path(fakevllm_server.__file__).parent
COMMIT_SIDES = ("before_commit", "after_commit")
TRAINING_PREFIXES = ("plan.", "train.", "save.", "publish.", "prune.", "roll_back.")


@cache
def all_labels() -> list[str]:
    texts = [file.read_text() for file in SOURCE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "crash_point(" in text or "Change(" in text]
    return sorted({label for tree in trees for label in _labels(tree)})


def training_labels() -> list[str]:
    """Return the labels between a pooled group and its checkpoint."""
    return [label for label in all_labels() if label.startswith(TRAINING_PREFIXES)]


def _labels(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Change"), args=[ast.Constant(value=label), *_]):
                yield from (f"{label}.{side}" for side in COMMIT_SIDES)
            case ast.Call(func=ast.Name(id="Change")):
                raise AssertionError(f"line {node.lineno}: the label of a Change is not a literal")
            case ast.Call(func=ast.Name(id="crash_point"), args=[ast.Constant(value=str(label))]):
                yield label
            case ast.Call(func=ast.Name(id="crash_point"), args=[ast.JoinedStr() as label]):
                assert ast.unparse(label) in {
                    f"f'{{change.label}}.{side}'" for side in COMMIT_SIDES
                }
            case _:
                pass
