"""A YAML loader for settings, which accepts only mappings, lists and scalars.

The loader refuses YAML features that settings do not need, because attackers can use these
features. Aliases can expand a kilobyte to a gigabyte. Tags call constructors that may raise any
exception. Deep nesting reaches the interpreter's recursion limit. The loader also refuses duplicate
keys, because YAML libraries silently take the last value.
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
            raise ValueError(f"{twice[0]!r:.80} is set twice: set it once")
        return super().construct_mapping(node, deep)


def loads(text: str) -> Any:
    """Parse a YAML text, and return its value.

    Raises yaml.YAMLError if the text is not YAML. Raises ValueError for aliases, tags, duplicate
    keys, nesting deeper than MAX_DEPTH, and lone surrogates.
    """
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
            # a lone surrogate raises UnicodeEncodeError, which is a ValueError
            str(event.value).encode()
    return yaml.load(text, _Loader)
