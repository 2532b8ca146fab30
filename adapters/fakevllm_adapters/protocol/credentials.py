"""What a request shows of its bearer: a key, and with Basic a name beside it. Pure.

A client whose server URL reads `http://NAME:KEY@host` sends Basic, and nothing else in its place:
an OpenAI client that was given an episode's key and such a URL shows the name and the key of the
URL. So nobody is asked for Basic (no `WWW-Authenticate`, at which browsers would ask their user),
and who shows it is taken for its key's bearer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import NamedTuple

from fakevllm_adapters.protocol.keys import bearer


class Shown(NamedTuple):
    key: str | None
    name: str | None = None
    """Whose key it is said to be; None where only the key is shown."""


def shown_by(headers: Mapping[bytes, bytes]) -> Shown:
    """A bearer's key, Basic, or the key as Anthropic's SDK sends it."""
    given, other = _text(headers, b"authorization"), _text(headers, b"x-api-key")
    shown = _basic(given) or Shown(bearer(given))
    return shown if shown.key else Shown(other)


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The API key in a request's headers."""
    return shown_by(headers).key


def _basic(authorization: str | None) -> Shown | None:
    """
    >>> _basic("Basic " + base64.b64encode(b"ann:sk-1").decode())
    Shown(key='sk-1', name='ann')
    """
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, key = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except ValueError:  # neither base64 nor UTF-8
        return None
    return Shown(key, name) if key else None


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
