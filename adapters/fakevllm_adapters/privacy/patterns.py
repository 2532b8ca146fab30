"""The patterns of texts that are redacted: built-in patterns, and the user's regular expressions.

The built-in patterns take linear time with Python's `re`, because they limit the length of each
repetition, or the places where a repetition can begin. A user's regular expression is run by RE2,
which takes linear time for every expression. Python's `re` could need hours for one text, and
cannot be interrupted.
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

_WINDOW_CHARS = 2**16
"""Number of characters that are searched at once. Python's `re` blocks all threads during a search,
so a long text is searched in parts."""
_WINDOW_OVERLAP = 2**14
"""Maximum length of a match that is certainly found if it crosses the end of a window."""

Span = tuple[int, int]
"""Start and end of a match, in characters."""

_NOT_IN_USER = re.compile(r"[\s@<>()\[\],;:\"'\\|{}=]")
_MAX_USER_CHARS = 64
_EMAIL_DOMAIN = re.compile(r"@(?:[^\W_](?:[\w-]{0,62})\.){1,8}[^\W\d_]{2,24}")
_GIT_USER = "git@"
"""Beginning of an address of a Git repository, which looks like an e-mail address."""
_PHONE = re.compile(
    r"""(?=[+(\d])(?:
      (?<![A-Za-z0-9_+/=.)\]]) \+ (?!\d{4}-\d\d-\d\d(?!\d)) (?!\d+\.\d+(?![\d.]))
      [1-9] (?: [\ \u00a0\-./()]{0,2} \d ){7,14} (?!\d)                     # +49 (0)30 123456
    | (?<![A-Za-z0-9_.,:/+-]) (?<!\d\ ) (?:
        (?:1[\ .-]?)? (?: \([2-9]\d\d\)\ ? | [2-9]\d\d(?P<a>[\ .-]) )
        [2-9]\d\d (?(a)(?P=a)|[\ .-]) \d{4}                                 # (212) 555-0123
      | \(0[1-9]\d{0,3}\)\ ?\d{2,4}(?:[\ -]?\d{2,5}){1,3}                   # (030) 1234567
      | 0[1-9]\d{0,3}[\ /-](?: \d{6,8} | \d{2,4}[\ -]\d{4} | \d\d(?:[\ -]\d\d){2,3} )
                                                                            # 030 1234567
      | 0[1-9]\d\d\ \d{3}\ \d{3}                                            # 0412 345 678
      | (?<![0-9a-f]\d[\ .-]) (?<!\d[0-9a-f][\ .-]) 0[1-9](?:(?P<b>[\ .-])\d\d)(?:(?P=b)\d\d){3}
        (?!\ [0-9a-f]{2}(?![A-Za-z0-9]))                                    # 01 23 45 67 89
      ) (?![A-Za-z0-9_]) (?![\ .,:/-]?\d)
    )""",
    re.VERBOSE | re.ASCII,
)
_MIN_PHONE_DIGITS = 9
"""Minimum number of digits of a number that does not begin with `+`. Dates have eight digits."""
_API_KEY = re.compile(
    r"""(?=[spgAxhneBb])(?<![A-Za-z0-9_])(?:
      sk-(?=[A-Za-z_-]{0,200}\d)[A-Za-z0-9_-]{16,}
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
    | (?:[Bb]earer|BEARER)\ {1,4}[A-Za-z0-9._~+/-]{15,}[A-Za-z0-9_~+/-]=*
    )""",
    re.VERBOSE,
)
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END[A-Z ]{0,40}(?:-----)?")
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=\s\\]*")
"""The lines of a private key whose end is missing."""
_MAX_PEM_CHARS = 16_000
"""Maximum distance between the beginning and the end of a private key."""
_CARD = re.compile(
    r"""(?<![A-Za-z0-9]) (?<!\d[.,]) (?=[2-6]) (?:
      \d{14,19}
    | \d{4} (?P<a>\ {1,2}|[\u00a0\u2009\u202f\u2010-\u2015_-]) \d{4} (?P=a) \d{4} (?P=a) \d{4}
      (?:(?P=a)\d{3})?
    | \d{4} (?P<b>\ {1,2}|[\u00a0\u2009\u202f\u2010-\u2015_-]) \d{6} (?P=b) \d{4,5}
    ) (?![A-Za-z0-9]) (?!\.\d)""",
    re.VERBOSE | re.ASCII,
)
_ISSUERS = re.compile(
    r"""
      4 (?:\d{15}|\d{18})                                                   # Visa
    | (?: 5[1-5] | 222[1-9] | 22[3-9]\d | 2[3-6]\d\d | 27[01]\d | 2720 ) \d*  # Mastercard
    | 3[47]\d{13}                                                           # American Express
    | (?: 30[0-5] | 3095 | 36 | 3[89] ) \d*                                 # Diners Club
    | (?: 6011 | 64[4-9] | 65 | 62 | 81 ) \d*                               # Discover, UnionPay
    | 35(?:2[89]|[3-8]\d)\d*                                                # JCB
    | 220[0-4]\d*                                                           # Mir
    | (?: 5018 | 5020 | 5038 | 5893 | 6304 | 6759 | 676[1-3] ) \d*          # Maestro
    """,
    re.VERBOSE | re.ASCII,
)
"""The first digits of the cards of each issuer, and the lengths of Visa and American Express."""
_LENGTHS = {"30": (14,), "36": (14,), "38": (14,), "39": (14,), "62": (16, 17, 18, 19)}
"""Numbers of digits of other cards by their first two digits. All others have 16 digits."""


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
    """A kind of text to redact, such as e-mail addresses: a name, and a function that finds the
    matches."""

    name: str
    """Name of the pattern, which stands in the text that replaces a match."""
    spans: Callable[[str], Iterable[Span]]
    """Function that returns start and end of each match in a text. Matches are not empty."""


def _matches(expression: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches in a text. A long text is searched in windows that overlap."""
    begin = 0
    while begin < len(text):
        end = begin + _WINDOW_CHARS
        limit = end + _WINDOW_OVERLAP
        for found in expression.finditer(text, begin, limit):
            if found.start() >= end:
                break
            if limit < len(text) and found.end() > end:  # perhaps cut off at the limit
                found = expression.match(text, found.start())
                if found is None:
                    continue
            yield found
            end = max(end, found.end())
        begin = end


def _spans_of(expression: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in _matches(expression, text))


def _email_spans(text: str) -> Iterator[Span]:
    done, at = 0, text.find("@")
    while at >= 0:
        domain = _EMAIL_DOMAIN.match(text, at)
        first = max(done, at - _MAX_USER_CHARS)
        for other in _NOT_IN_USER.finditer(text, first, at):
            first = other.end()
        if domain is not None and first < at and not text.startswith(_GIT_USER, first):
            done = domain.end()
            yield first, done
        at = text.find("@", max(at + 1, done))


def _phone_spans(text: str) -> Iterator[Span]:
    for found in _matches(_PHONE, text):
        number = found.group()
        if number[0] == "+" or sum(map(str.isdigit, number)) >= _MIN_PHONE_DIGITS:
            yield found.span()


def _card_spans(text: str) -> Iterator[Span]:
    for found in _matches(_CARD, text):
        if is_card_number("".join(filter(str.isdigit, found.group()))):
            yield found.span()


def is_card_number(digits: str) -> bool:
    """Return True if the digits are the number of a payment card. The first digits must belong to
    an issuer, the length must be one that this issuer uses, and the check digit must be correct.

    >>> is_card_number("4111111111111111"), is_card_number("1111111111111117")
    (True, False)
    """
    if _ISSUERS.fullmatch(digits) is None:
        return False
    if digits[0] != "4" and digits[:2] not in ("34", "37"):
        is_length = len(digits) in _LENGTHS.get(digits[:2], (16,))
    else:
        is_length = True  # the pattern of the issuer has the lengths
    return is_length and has_check_digit(digits)


def _api_key_spans(text: str) -> Iterator[Span]:
    yield from _spans_of(_API_KEY, text)
    done = 0
    for begin in _PEM_BEGIN.finditer(text):
        if begin.start() < done:
            continue
        place = text.find("-----END", begin.end(), begin.end() + _MAX_PEM_CHARS)
        last = _PEM_END if place >= 0 else _PEM_BODY
        end = last.match(text, place if place >= 0 else begin.end())
        done = begin.end() if end is None else end.end()
        yield begin.start(), done


BUILT_IN = {
    "email": Pattern("email", _email_spans),
    "phone": Pattern("phone", _phone_spans),
    "card": Pattern("card", _card_spans),
    "api_key": Pattern("api_key", _api_key_spans),
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
            "regular expressions need RE2: install it with `pip install -e '.[privacy]'` "
            "in the clone of fakevllm"
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
    """Yield the matches of a compiled RE2 expression, as positions in characters. RE2 searches the
    text's bytes. This function converts the positions itself, because RE2's conversion takes
    quadratic time if there are many matches."""
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
