"""Numbers, times and foreign text, as they are told and as they are shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fakevllm.runtime.terminal_text import printable

UNMEASURED = "-"
MINUTES_FROM_S, HOURS_FROM_S, DAYS_FROM_S = 120.0, 7_200.0, 172_800.0


def clean(text: str) -> str:
    """On one line, and nothing in it that a terminal obeys.

    >>> clean("a\\nb\\x1b[31m")
    'a⏎b�[31m'
    """
    return printable(text.replace("\n", "⏎"))


def seconds_of(told: str) -> float | None:
    """
    >>> seconds_of("12.5s"), seconds_of("3"), seconds_of("N/A"), seconds_of("nan")
    (12.5, 3.0, None, None)
    """
    try:
        seconds = float(told.removesuffix("s"))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def ago(seconds: float) -> str:
    """
    >>> ago(3.2), ago(150), ago(8000), ago(-1), ago(200_000)
    ('3 s', '2 min', '2.2 h', '0 s', '2.3 days')
    """
    if seconds < MINUTES_FROM_S:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < HOURS_FROM_S:
        return f"{seconds // 60:.0f} min"
    if seconds < DAYS_FROM_S:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def shown(value: float | None) -> str:
    """
    >>> shown(0.3125), shown(None), shown(12345.6), shown(math.nan), shown(-0.00001)
    ('0.312', '-', '12,346', 'nan', '-1e-05')
    """
    if value is None:
        return UNMEASURED
    if math.isfinite(value) and 1_000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def counted(numbers: Mapping[str, float]) -> str:
    """
    >>> counted({"open_groups": 0, "finished_groups": 2, "tokens": 2600})
    '2 finished groups, 2,600 tokens'
    """
    return ", ".join(
        f"{number:,.0f} {clean(name).replace('_', ' ')}"
        for name, number in numbers.items()
        if number
    )
