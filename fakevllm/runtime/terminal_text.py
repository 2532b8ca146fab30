"""Text of apps, users and engines for a terminal, which obeys what it is sent. Pure."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """With a sign in the place of whatever is no character to be seen, but for those to `keep`.

    >>> printable("a\\x1b[31m\\nb", keep="\\n")
    'a�[31m\\nb'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else "�" for one in text)
