"""The settings of the section `[privacy]`: what is redacted, and how long contents are kept. The
training job contains these settings, so that the server gets them too."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fakevllm_adapters.privacy.patterns import BUILT_IN, MAX_PATTERNS, compile_expression
from fakevllm_adapters.privacy.redactor import TOKENS, UNREADABLE, Redactor

BuiltIn = Literal["email", "phone", "card", "api_key"]
BUILT_IN_NAMES: tuple[BuiltIn, ...] = get_args(BuiltIn)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RESERVED = {*BUILT_IN, TOKENS, UNREADABLE}


def _checked_patterns(patterns: dict[str, str]) -> dict[str, str]:
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"there are {len(patterns)} patterns, and {MAX_PATTERNS} are allowed")
    for name, expression in patterns.items():
        if _NAME.fullmatch(name) is None or name in _RESERVED:
            raise ValueError(
                f"{name!r:.60} cannot be the name of a pattern: use up to 32 lower-case letters, "
                f"digits and underscores, and none of {', '.join(sorted(_RESERVED))}"
            )
        try:
            compile_expression(name, expression)
        except ValueError as error:
            raise ValueError(f"pattern {name}: {error}") from None
    return patterns


def usable_part(values: dict[str, Any]) -> PrivacySettings:
    """Return settings that contain only the built-in patterns in `values["redact"]`. `values` are
    the settings of the section `[privacy]`. Use this function if `values` cannot be used as a
    whole, for example because RE2 is not installed, or because a newer version of fakevllm has
    written `values`."""
    names: object = values.get("redact")
    known = cast("list[Any]", names) if isinstance(names, list) else []
    return PrivacySettings(redact=tuple(name for name in BUILT_IN_NAMES if name in known))


class PrivacySettings(BaseModel):
    """Settings for the redaction of texts before they are written, and limits on the age and the
    size of stored contents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    redact: tuple[BuiltIn, ...] = ()
    """Built-in patterns whose matches are redacted: `email`, `phone`, `card` and `api_key`."""
    patterns: Annotated[dict[str, str], AfterValidator(_checked_patterns)] = {}
    """Regular expressions in RE2's syntax whose matches are redacted, by name."""

    retention_days: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Days after which the contents of a group are pruned. None means never. A group is a request
    with the answers that were sampled for it."""
    max_ledger_mb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Megabytes of the ledger's content above which the contents of the oldest groups are pruned.
    None means no limit."""
    max_journal_mb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same for the server's journal."""

    @property
    def redacts(self) -> bool:
        """True if the settings have a pattern, so that matching texts are redacted."""
        return bool(self.redact or self.patterns)

    def union(self, other: PrivacySettings) -> PrivacySettings:
        """Return settings that redact and prune whatever `self` or `other` redacts or prunes. To
        prune is to delete old contents. If `self` and `other` use one name for two different
        regular expressions, a number is added to the name from `other`."""
        if other == self or other == PrivacySettings():
            return self
        patterns = dict(self.patterns)
        for name, expression in other.patterns.items():
            if expression not in patterns.values():
                patterns[_free_name(name, patterns)] = expression
        names = dict.fromkeys((*self.redact, *other.redact))
        return self.model_construct(
            redact=tuple(sorted(names)),
            patterns=patterns,
            retention_days=_smaller(self.retention_days, other.retention_days),
            max_ledger_mb=_smaller(self.max_ledger_mb, other.max_ledger_mb),
            max_journal_mb=_smaller(self.max_journal_mb, other.max_journal_mb),
        )

    def covers(self, other: PrivacySettings) -> bool:
        """Return True if these settings redact whatever `other` redacts. Names of regular
        expressions do not matter."""
        expressions = set(self.patterns.values())
        return set(other.redact) <= set(self.redact) and expressions.issuperset(
            other.patterns.values()
        )

    @property
    def redactor(self) -> Redactor:
        """An object that redacts texts with the patterns of these settings."""
        return _redactor(self.redact, tuple(self.patterns.items()))


def _smaller(first: float | None, second: float | None) -> float | None:
    return min((one for one in (first, second) if one is not None), default=None)


def _free_name(name: str, used: dict[str, str]) -> str:
    if name not in used:
        return name
    numbers = range(2, len(used) + 3)
    return next(free for n in numbers if (free := f"{name[:28]}_{n}") not in used)


@cache
def _redactor(names: tuple[str, ...], expressions: tuple[tuple[str, str], ...]) -> Redactor:
    built_in = [BUILT_IN[name] for name in dict.fromkeys(names)]
    own = [compile_expression(name, expression) for name, expression in expressions]
    return Redactor([*built_in, *own])
