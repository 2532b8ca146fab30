"""YAML as settings are written in it: mappings, lists and scalars.

Aliases multiply (a kilobyte can stand for a gigabyte), tags raise whatever their constructors
raise, and nesting without end ends in the interpreter's own limit: none of them is needed. Of a key
that stands twice YAML's libraries take the last one without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import yaml

MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(str(key.value) for key, _ in node.value)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r:.80} stands twice: name it once")
        return super().construct_mapping(node, deep)


def loads(text: str) -> Any:
    """Raises ValueError, and yaml.YAMLError for what is no YAML at all."""
    depth = 0
    parse = cast(Callable[..., Iterator[Any]], yaml.parse)  # pyright: ignore[reportUnknownMemberType]
    for event in parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("aliases (`*name`) are not read here")
        if getattr(event, "tag", None) not in (None, "!"):
            raise ValueError("tags (`!name`) are not read here")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent):
            str(event.value).encode()  # half a surrogate is a UnicodeEncodeError, a ValueError
    return yaml.load(text, _Loader)
