"""Escape untrusted text before it is printed. Untrusted text comes from apps, users and engines. A
terminal would execute control sequences in such text."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Return the text with each unprintable character replaced by U+FFFD, except the characters in
    `keep`.

    >>> printable("a\\x1b[31m\\nb", keep="\\n")
    'a�[31m\\nb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "�" for char in text)
