"""Read the API key and the user name from a request's headers.

Basic authentication is accepted, and its password is taken as the API key. The reason is server
URLs of the form `http://NAME:KEY@host`. With such a URL, HTTP clients send Basic authentication and
no other credentials. Even an OpenAI client with an episode's key sends the name and the key of the
URL instead of the episode's key.

No response demands Basic authentication, because browsers would then ask their user for a password.
This module does no I/O.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import NamedTuple

from fakevllm_adapters.protocol.keys import bearer_key


class Credentials(NamedTuple):
    """The API key of a request and the user name sent with it."""

    key: str | None
    name: str | None = None
    """User name that the client sent with the key; None if it sent only a key."""


def credentials_in(headers: Mapping[bytes, bytes]) -> Credentials:
    """Return the API key and the user name in a request's headers.

    Both are read from the header `Authorization` (Basic or Bearer). If this header has no key, the
    API key is read from the header `x-api-key`, which Anthropic's SDK sends.
    """
    authorization = _text(headers, b"authorization")
    if authorization is None:
        return Credentials(_text(headers, b"x-api-key"))
    credentials = _basic(authorization) or Credentials(bearer_key(authorization))
    return credentials if credentials.key else Credentials(_text(headers, b"x-api-key"))


def api_key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the API key in a request's headers, or None if the headers have no key."""
    return credentials_in(headers).key


def _basic(authorization: str) -> Credentials | None:
    """Return the credentials in an Authorization header of the scheme Basic.

    Return None if the header has another scheme, is malformed, or has no password.

    >>> _basic("Basic " + base64.b64encode(b"ann:sk-1").decode())
    Credentials(key='sk-1', name='ann')
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, key = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except ValueError:  # neither base64 nor UTF-8
        return None
    return Credentials(key, name) if key else None


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
