"""Format numbers, durations and untrusted text for the screen, and parse durations. This module
does no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fakevllm.runtime.terminal_text import printable

UNMEASURED = "-"
MINUTES_FROM_S, HOURS_FROM_S, DAYS_FROM_S = 120.0, 7_200.0, 172_800.0


def clean(text: str) -> str:
    """Return untrusted text on one line, without characters that control a terminal.

    >>> clean("a\\nb\\x1b[31m")
    'a⏎b�[31m'
    """
    return printable(text.replace("\n", "⏎"))


def parse_seconds(text: str) -> float | None:
    """Return the number of seconds in a text such as "12.5s". Swarm servers report durations in
    this format. Return None if the text has no number, or if the number is NaN or infinite.

    >>> parse_seconds("12.5s"), parse_seconds("3"), parse_seconds("N/A"), parse_seconds("nan")
    (12.5, 3.0, None, None)
    """
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def format_duration(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes, hours or days, depending on its length. A
    negative duration counts as 0.

    >>> [format_duration(seconds) for seconds in (3.2, 150, 8000, -1, 200_000)]
    ['3 s', '2 min', '2.2 h', '0 s', '2.3 days']
    """
    if seconds < MINUTES_FROM_S:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < HOURS_FROM_S:
        return f"{seconds // 60:.0f} min"
    if seconds < DAYS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def format_number(value: float | None) -> str:
    """Return a number as text with three significant digits, or "-" for None. Numbers whose
    absolute value is from 1,000 to a billion are shown as integers.

    >>> [format_number(value) for value in (0.3125, None, 12345.6, math.nan, -0.00001)]
    ['0.312', '-', '12,346', 'nan', '-1e-05']
    """
    if value is None:
        return UNMEASURED
    if math.isfinite(value) and 1_000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_counts(counts: Mapping[str, float]) -> str:
    """Return one text with all counts that are not 0, each followed by its name.

    >>> format_counts({"open_groups": 0, "finished_groups": 2, "tokens": 2600})
    '2 finished groups, 2,600 tokens'
    """
    return ", ".join(
        f"{count:,.0f} {clean(name).replace('_', ' ')}" for name, count in counts.items() if count
    )


def format_groups(count: float) -> str:
    """Return a text with a number of groups and the noun "group" or "groups".

    >>> format_groups(1), format_groups(2)
    ('1 group', '2 groups')
    """
    return f"{count:.0f} group{'s' * (count != 1)}"
