"""Find the URLs of images, audio and video in a request's messages, and decide whether an engine
may fetch them. This module does no I/O.

An engine must not fetch every URL. A client could otherwise reach addresses that only the engine's
machine can reach, such as a cloud's metadata service.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import cast

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.http.json_body import parse_as_vllm
from fakevllm_adapters.protocol.errors import WireError, bad_request

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_URL_OF_HOST = re.compile(r"https?://([a-z0-9.-]+)(:[0-9]+)?([/?#][^\\\s]*)?", re.IGNORECASE)
"""Pattern for a URL in which all URL parsers find the same host. Parsers disagree about user names,
backslashes and spaces, so URLs with one of them do not match."""
_URL_FIELDS = ("image_url", "video_url", "audio_url", "file_url")
"""Fields of a content part whose value is a URL, or an object with the field `url`."""
_REQUEST_FIELDS = ("messages", "input", "system")
"""Fields of a request that contain messages or content parts."""
_NESTED_FIELDS = ("content", "output")
"""Fields of a message or a content part that contain content parts. The field `input` is not
included: in a part of type `tool_use`, it has a tool's arguments, and no engine fetches URLs in
arguments."""


def is_host_name(text: str) -> bool:
    """Return whether the text is a host name in lower case, such as `images.example.com`.

    >>> is_host_name("images.example.com"), is_host_name("https://example.com")
    (True, False)
    """
    return _HOST.fullmatch(text) is not None


def media_refusal(
    raw: bytes, body: Json | None, allowed_hosts: Collection[str]
) -> WireError | None:
    """Return the error (400) for the first media URL of a request that the engine may not fetch.
    Return None if the engine may fetch all URLs.

    `body` is the parsed request. If `body` is None, `raw` is parsed as in vLLM, which accepts some
    bodies that orjson refuses. The caller must have refused bodies that are nested deeper than
    `json_body.MAX_DEPTH`. A `data:` URL is always allowed, because its content is in the URL.
    """
    request = body if body is not None else parse_as_vllm(raw)
    if not isinstance(request, dict):
        return None
    for url in _media_urls([cast(Json, request).get(name) for name in _REQUEST_FIELDS]):
        if url[:5].lower() == "data:":
            continue
        match = _URL_OF_HOST.fullmatch(url)
        host = match[1].lower() if match is not None else None
        if host is None or host not in allowed_hosts:
            return bad_request(_refusal_text(url, host))
    return None


def _refusal_text(url: str, host: str | None) -> str:
    if host is None:
        return (
            f"The media URL {url[:100]!r} is not fetched: send the content as a `data:` URL, or "
            "use a plain `https://HOST/PATH` URL of an allowed host."
        )
    return (
        f"Media URLs of the host {host[:100]!r} are not fetched: send the content as a `data:` "
        f"URL, or let the server's owner start it with `--media-domain {host[:100]}`."
    )


def _media_urls(node: object) -> Iterator[str]:
    """Yield the media URLs in messages or content parts of any wire format. `node` is a JSON
    value."""
    rest: list[object] = [node]  # not recursive, because orjson parses deeper than Python recurses
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest.extend(reversed(cast(list[object], node)))
        elif isinstance(node, dict):
            fields = cast(Json, node)
            yield from _own_urls(fields)
            rest.extend(fields.get(name) for name in reversed(_NESTED_FIELDS))


def _own_urls(fields: Json) -> Iterator[str]:
    """Yield the media URLs of one content part. URLs in nested parts are left out."""
    for name in _URL_FIELDS:
        value: object = fields.get(name)
        url = cast(Json, value).get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            yield url
    source: object = fields.get("source")
    if isinstance(source, dict) and isinstance(url := cast(Json, source).get("url"), str):
        yield url
