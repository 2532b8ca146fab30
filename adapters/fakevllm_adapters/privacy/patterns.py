"""The patterns of texts that are redacted: built-in patterns, and the user's regular expressions.

The built-in patterns take linear time with Python's `re`, because every repetition in them is
bounded, or begins only where a match may begin. A user's regular expression is run by RE2, which
takes linear time for every expression. Python's `re` could need hours for one text, and cannot be
interrupted.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

MARKER = re.compile(r"\[redacted: [a-z][a-z0-9_]{0,31}\]")
"""Text that replaces a redacted text. Nothing inside of a marker is searched."""
MAX_EXPRESSION_CHARS = 1000
"""Maximum length of a user's regular expression."""
MAX_PATTERNS = 100
"""Maximum number of a user's regular expressions, because each is run over every text."""
_MAX_RE2_BYTES = 8 * 2**20
"""Memory in bytes that RE2 may use for one expression. This is RE2's own default."""

Span = tuple[int, int]
"""Start and end of a match, in characters."""

_EMAIL = re.compile(
    r"[^\s@<>()\[\],;:\"'\\|{}=]{1,64}@(?:[^\W_](?:[\w-]{0,62})\.){1,8}[^\W\d_]{2,24}"
)
_PHONE = re.compile(
    r"""(?=[+(\d])(?:
      \+ \d (?: [\ \u00a0\-./()]{0,2} \d ){6,14} (?!\d)                    # +49 (0)30 123456
    | (?<![\w.]) (?:1[\ .-]?)? (?:\(\d{3}\)\ ? | \d{3}[\ .-]) \d{3}[\ .-]\d{4} (?!\w)
    | (?<![\w.]) 0\d{2,4} [\ /-] \d{2,4} (?: [\ -]? \d{2,4} ){1,4} (?!\d)  # 030 1234567
    | (?<![\w.]) 0\d (?: [\ .]\d\d ){4} (?!\d)                             # 01 23 45 67 89
    )""",
    re.VERBOSE,
)
_API_KEY = re.compile(
    r"""(?=[spgAxhneBb-])(?:(?<![A-Za-z0-9_])(?:
      sk-[A-Za-z0-9_-]{16,}
    | (?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,}
    | gh[pousr]_[A-Za-z0-9]{20,}
    | github_pat_[A-Za-z0-9_]{20,}
    | glpat-[A-Za-z0-9_-]{20,}
    | (?:AKIA|ASIA)[A-Z0-9]{16}
    | AIza[A-Za-z0-9_-]{35}
    | xox[a-z]-[A-Za-z0-9-]{10,}
    | hf_[A-Za-z0-9]{30,}
    | npm_[A-Za-z0-9]{36}
    | (?<!-)eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
    | [Bb]earer\ [A-Za-z0-9._~+/-]{15,}[A-Za-z0-9_~+/-]=*
    )
    | -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----[^-]{0,16000}(?:-----END\ [A-Z ]{0,30}KEY-----)?
    )""",
    re.VERBOSE,
)
_DIGITS = re.compile(r"(?<![A-Za-z0-9])(?<!\d\.)\d(?:[ \n\u00a0.\u2010-\u2015-]?\d){11,}", re.ASCII)
"""At least twelve digits, with at most one separator between two of them. Card numbers are parts of
such a run, which may have other numbers before and after the card. The digits of a random id have
letters beside them."""
_CARD_LENGTHS = (16, 15, 19, 18, 17, 14, 13, 12)
"""Numbers of digits of payment cards. The most frequent lengths are first."""


def marker(name: str) -> str:
    """Return the text that replaces a match of the pattern `name`.

    >>> marker("email")
    '[redacted: email]'
    """
    return f"[redacted: {name}]"


def has_check_digit(digits: str) -> bool:
    """Return True if the last digit is the check digit of a card number (Luhn's algorithm, ISO/IEC
    7812-1).

    >>> has_check_digit("4111111111111111"), has_check_digit("4111111111111112")
    (True, False)
    """
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of texts that are redacted."""

    name: str
    """Name of the pattern, which stands in the text that replaces a match."""
    spans: Callable[[str], Iterable[Span]]
    """Function that returns start and end of each match in a text. Matches are not empty."""


def _spans_of(expression: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in expression.finditer(text))


def _email_spans(text: str) -> Iterable[Span]:
    return _spans_of(_EMAIL, text) if "@" in text else ()


def _card_spans(text: str) -> Iterator[Span]:
    for run in _DIGITS.finditer(text):
        at = [place for place in range(*run.span()) if "0" <= text[place] <= "9"]
        if text[run.end() : run.end() + 1].isalpha():  # the last number belongs to a word
            at = _without_last_number(at)
        digits = "".join(text[place] for place in at)
        first = 0
        while first <= len(at) - min(_CARD_LENGTHS):
            end = _end_of_card(at, digits, first)
            if end is not None:
                yield at[first], at[end - 1] + 1
            first = end or first + 1


def _without_last_number(at: list[int]) -> list[int]:
    """Return the positions of digits without those of the last number."""
    end = len(at) - 1
    while end > 0 and at[end - 1] == at[end] - 1:
        end -= 1
    return at[:end]


def _end_of_card(at: list[int], digits: str, first: int) -> int | None:
    """Return the end of the card number that begins with digit `first` of a run of digits, or None
    if no card begins there. `at` has the positions of the digits in the text. A card has no other
    digit directly beside it."""
    if first > 0 and at[first] == at[first - 1] + 1:
        return None
    for length in _CARD_LENGTHS:
        end = first + length
        if end > len(at) or (end < len(at) and at[end] == at[end - 1] + 1):
            continue
        number = digits[first:end]
        if len(set(number)) > 1 and has_check_digit(number):
            return end
    return None


BUILT_IN = {
    "email": Pattern("email", _email_spans),
    "phone": Pattern("phone", partial(_spans_of, _PHONE)),
    "card": Pattern("card", _card_spans),
    "api_key": Pattern("api_key", partial(_spans_of, _API_KEY)),
}
"""The built-in patterns by name."""


def compile_expression(name: str, expression: str) -> Pattern:
    """Return the pattern of a user's regular expression in RE2's syntax.

    Raises ValueError if the expression is malformed, or if it matches an empty text. Also raises
    ValueError if RE2 is not installed.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION_CHARS} characters")
    try:
        re2: Any = importlib.import_module("re2")
    except ImportError:
        raise ValueError(
            "regular expressions need RE2: install it with `pip install 'fakevllm[privacy]'`"
        ) from None
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_RE2_BYTES
    try:
        compiled = re2.compile(expression.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        cause = error.args[0] if error.args else ""
        text = cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)
        raise ValueError(f"not a regular expression of RE2: {text}") from None
    if compiled.search(b"") is not None:
        raise ValueError("the expression matches an empty text, so it would match everywhere")
    return Pattern(name, partial(_re2_spans, compiled))


def _re2_spans(compiled: Any, text: str) -> Iterator[Span]:
    """Yield the matches of a compiled RE2 expression. RE2 searches bytes; its own conversion of
    positions would take quadratic time for many matches."""
    encoded = text.encode(errors="surrogatepass")
    is_ascii = len(encoded) == len(text)
    chars, done = 0, 0

    def char_at(place: int) -> int:
        nonlocal chars, done
        if is_ascii:
            return place
        # a character begins with each byte that is no continuation byte (0b10xxxxxx)
        chars += sum(byte & 0xC0 != 0x80 for byte in encoded[done:place])
        done = place
        return chars

    for match in compiled.finditer(encoded):
        start, end = match.span()
        if start < end:
            yield char_at(start), char_at(end)
