"""Every place at which the server's code can be made to end, read from that code: a new one cannot
be forgotten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fakevllm_server

SOURCE = Path(fakevllm_server.__file__).parent
WHENS = ("before_commit", "after_commit")
TRAINING = ("plan.", "train.", "save.", "publish.", "prune.", "roll_back.")


@cache
def all_labels() -> list[str]:
    texts = [file.read_text() for file in SOURCE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "crash_point(" in text or "Change(" in text]
    return sorted({label for tree in trees for label in _labels(tree)})


def training_labels() -> list[str]:
    """Of the way from a pooled group to a checkpoint."""
    return [label for label in all_labels() if label.startswith(TRAINING)]


def _labels(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Change"), args=[ast.Constant(value=label), *_]):
                yield from (f"{label}.{when}" for when in WHENS)
            case ast.Call(func=ast.Name(id="Change")):
                raise AssertionError(f"line {node.lineno}: a change without a plain label")
            case ast.Call(func=ast.Name(id="crash_point"), args=[ast.Constant(value=str(label))]):
                yield label
            case ast.Call(func=ast.Name(id="crash_point"), args=[ast.JoinedStr() as made]):
                assert ast.unparse(made) in {f"f'{{change.label}}.{when}'" for when in WHENS}
            case _:
                pass
