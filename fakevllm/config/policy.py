"""`[policy]` in fakevllm.toml: which requests are fanned out, and into how many."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fakevllm.config.base import Section
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.validation_messages import closest_name
from fakevllm_adapters.protocol.swarm import MAX_GROUP_SIZE

SideRule = Literal["no_tools", "marker", "quoted"]
"""The rules that guess; names and headers count wherever they are given."""

_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def _header(text: str) -> str:
    if _HEADER.fullmatch(text.partition(":")[0].strip()) is None:
        raise ValueError("write a header as 'X-Name', or as 'X-Name: value'")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(
            f"is no regular expression ({error}): write one, such as '^Translate'"
        ) from None
    return text


def _route(text: str) -> str:
    if text not in ADAPTERS:
        raise ValueError(f"is no route: write one of {', '.join(ADAPTERS)}")
    return text


def _some(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty, and would be true of every request: write some text")
    return text


def _sizes(found: dict[str, int]) -> dict[str, int]:
    for name, num in found.items():
        if not 1 <= num <= MAX_GROUP_SIZE:
            raise ValueError(f"{name!r} is to have 1 to {MAX_GROUP_SIZE} siblings, not {num}")
    return found


Route = Annotated[str, AfterValidator(_route)]
"""A format's name."""
_Some = Annotated[str, AfterValidator(_some)]
_Header = Annotated[str, AfterValidator(_header)]


class SkipRule(Section):
    """Requests that are served once. All that is named must be so."""

    name: str | None = None
    """What the ledger calls the rule; its number by default."""
    route: Route | None = None
    model: _Some | None = None
    """As the app names it; `*` stands for any text."""
    header: _Header | None = None
    """`X-Name`, or `X-Name: value`, where `*` stands for any text."""
    key: _Some | None = None
    """The app's: its name in the key file, or its fingerprint."""
    prompt_chars: int | None = Field(default=None, ge=0)
    """More characters of text than this."""
    images: Literal[True] | None = None
    first_message: Annotated[str, AfterValidator(_pattern)] | None = None
    """A regular expression that is found in the first user message."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.model_fields_set - {"name"}):
            conditions = ", ".join(name for name in type(self).model_fields if name != "name")
            raise ValueError(f"this rule would skip every request: name one of {conditions}")
        return self

    @cached_property
    def first_message_pattern(self) -> re.Pattern[str] | None:
        return None if self.first_message is None else re.compile(self.first_message)


class PolicySection(Section):
    sample_fraction: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Share of sessions whose requests are fanned out."""
    shadow: bool = False
    """Apps get the answer to their own request, as without us; siblings train in the background."""
    n: Annotated[dict[str, int], AfterValidator(_sizes)] = Field(default_factory=dict)
    """Siblings by route (chat, completions, responses, messages) or by model, as apps name it; a
    model's number wins."""
    side_models: tuple[_Some, ...] = ()
    """Names by which clients ask for side calls; `*` stands for any text."""
    side_headers: tuple[_Header, ...] = ()
    """Headers that only side calls have."""
    side_markers: tuple[_Some, ...] = ()
    """How the system or only message of a side call begins, beside those known."""
    side_rules: tuple[SideRule, ...] = ("no_tools", "marker", "quoted")
    """Which guesses count."""
    skip: tuple[SkipRule, ...] = ()

    @property
    def odd_names(self) -> list[tuple[str, str]]:
        """Names in `n` that are spelt nearly as a route is, with that. A model may be called so."""
        names = [name for name in self.n if name not in ADAPTERS]
        return [
            (name, route) for name in names if (route := closest_name(name, ADAPTERS)) is not None
        ]

    @property
    def most_siblings(self) -> int:
        """The largest of the numbers in `n`, 0 where it has none."""
        return max(self.n.values(), default=0)
