"""Reads the flags `--redact`, `--redact-pattern`, `--retention-days` and `--max-journal-mb`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from fakevllm_adapters.http.validation_messages import problem_text
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_runtime.errors import ConfigError


def read_privacy(
    names: Sequence[str],
    patterns: Sequence[str],
    *,
    retention_days: int = 0,
    max_journal_mb: int = 0,
) -> PrivacySettings:
    """Return the settings for redaction and for the deletion of old data. `names` are names of
    built-in patterns for redaction. Each further pattern in `patterns` has the form
    `NAME=EXPRESSION`. A limit of 0 means no limit.

    Raises ConfigError for an unknown name, and for a malformed pattern.
    """
    expressions: dict[str, str] = {}
    for pattern in patterns:
        name, equals, expression = pattern.partition("=")
        if not equals or name in expressions:
            problem = "is no NAME=EXPRESSION" if not equals else "has a name that is used before"
            raise ConfigError(f"--redact-pattern {pattern!r:.80} {problem}.")
        expressions[name] = expression
    settings = {
        "redact": names,
        "patterns": expressions,
        "retention_days": retention_days or None,
        "max_journal_mb": max_journal_mb or None,
    }
    try:
        return PrivacySettings.model_validate(settings)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        flag = "--redact" if problem["loc"][0] == "redact" else "--redact-pattern"
        raise ConfigError(f"{flag}: {problem_text(problem)}.") from None
