"""The section `[policy]` of fakevllm.toml: which requests are fanned out (sampled several times),
and how many answers are sampled for each."""

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
"""Names of the heuristics that recognise side calls (requests that a client program makes on its
own, such as title generation). The settings `side_models` and `side_headers` are no heuristics and
always apply."""

_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def _checked_header(text: str) -> str:
    if _HEADER.fullmatch(text.partition(":")[0].strip()) is None:
        raise ValueError("write a header as 'X-Name', or as 'X-Name: value'")
    return text


def _checked_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(
            f"is not a regular expression ({error}): write one, such as '^Translate'"
        ) from None
    return text


def _checked_route(text: str) -> str:
    if text not in ADAPTERS:
        raise ValueError(f"is not a route: write one of {', '.join(ADAPTERS)}")
    return text


def _checked_text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty, and would match every request: write some text")
    return text


def _checked_sizes(sizes: dict[str, int]) -> dict[str, int]:
    for name, num in sizes.items():
        if not 1 <= num <= MAX_GROUP_SIZE:
            raise ValueError(f"{name!r} must have 1 to {MAX_GROUP_SIZE} siblings, got {num}")
    return sizes


Route = Annotated[str, AfterValidator(_checked_route)]
"""Name of an API format: chat, completions, responses or messages."""
_NonEmptyText = Annotated[str, AfterValidator(_checked_text)]
_Header = Annotated[str, AfterValidator(_checked_header)]


class SkipRule(Section):
    """A rule `[[policy.skip]]`, which excludes requests from training. A request is sampled once
    and not trained if all conditions of the rule hold."""

    name: str | None = None
    """Name under which the ledger records the rule. None means that the ledger records the rule's
    number."""
    route: Route | None = None
    """Route of the request: `chat`, `completions`, `responses` or `messages`."""
    model: _NonEmptyText | None = None
    """Model name in the app's request; `*` matches any text."""
    header: _Header | None = None
    """Request header, as `X-Name` or `X-Name: value`. In the value, `*` matches any text."""
    key: _NonEmptyText | None = None
    """The app's API key, by its name in the key file or by its fingerprint."""
    prompt_chars: int | None = Field(default=None, ge=0)
    """A request matches if its text has more characters than this number."""
    images: Literal[True] | None = None
    """If True, only requests with images match."""
    first_message: Annotated[str, AfterValidator(_checked_pattern)] | None = None
    """Regular expression to search for in the first user message."""

    @model_validator(mode="after")
    def _check_that_it_has_a_condition(self) -> Self:
        if not (self.model_fields_set - {"name"}):
            conditions = ", ".join(name for name in type(self).model_fields if name != "name")
            raise ValueError(f"this rule would skip every request: name one of {conditions}")
        return self

    @cached_property
    def first_message_pattern(self) -> re.Pattern[str] | None:
        return None if self.first_message is None else re.compile(self.first_message)


class PolicySection(Section):
    """The section `[policy]`: which requests are fanned out (sampled several times), and how many
    siblings (answers) are sampled for each."""

    sample_fraction: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Fraction of sessions (conversations) whose requests are fanned out. A hash of the session
    decides which sessions these are."""
    shadow: bool = False
    """Whether apps get the answer to their own, unchanged request even if another sibling has a
    higher reward. If True, the other siblings are sampled and trained in the background."""
    n: Annotated[dict[str, int], AfterValidator(_checked_sizes)] = Field(default_factory=dict)
    """Number of siblings for a route, or for a model name in the app's request. If both are set,
    the number for the model name applies."""
    side_models: tuple[_NonEmptyText, ...] = ()
    """Model names that clients use for side calls (requests of the client program itself, such as
    title generation); `*` matches any text."""
    side_headers: tuple[_Header, ...] = ()
    """Headers that only side calls have, as `X-Name` or `X-Name: value`."""
    side_markers: tuple[_NonEmptyText, ...] = ()
    """Texts by which further kinds of side calls are recognised. A request is a side call if one of
    its system messages begins with one of these texts. If the request has only one message besides
    the system messages, this message is compared too."""
    side_rules: tuple[SideRule, ...] = ("no_tools", "marker", "quoted")
    """Names of the active heuristics that recognise side calls."""
    skip: tuple[SkipRule, ...] = ()
    """Rules that exclude requests from training. The first rule that matches a request is applied.
    """

    @property
    def likely_misspelt_routes(self) -> list[tuple[str, str]]:
        """Pairs (key, route) for keys of the setting `n` that look like a misspelt name of a route.
        Such a key is not an error, because a key of `n` may also be the name of a model."""
        names = [name for name in self.n if name not in ADAPTERS]
        return [
            (name, route) for name in names if (route := closest_name(name, ADAPTERS)) is not None
        ]

    @property
    def max_siblings(self) -> int:
        """The largest number of siblings in the setting `n`, which maps routes and models to
        numbers of siblings. The result is 0 if `n` has no entries."""
        return max(self.n.values(), default=0)
