"""Decide which paths a page may link to: those of this console, and never another site's."""

from __future__ import annotations

import re
from urllib.parse import quote

from fastapi import Request

LOGIN_PATHS = frozenset({"/login", "/login/key", "/login/new-link"})
_OWN_PATH = re.compile(r"/(?![/\\])[\x21-\x7e]*")
"""A path of this console. `//host` and `/\\host` would be addresses of other sites."""


def own_path(path: str) -> str:
    """Return `path` if it is a path of this console, and otherwise the first page.

    >>> own_path("/groups?state=lost"), own_path("//other.example")
    ('/groups?state=lost', '/')
    """
    is_own = _OWN_PATH.fullmatch(path) is not None and path.partition("?")[0] not in LOGIN_PATHS
    return path if is_own else "/"


def path_of(request: Request) -> str:
    """Return the path and the query of a request, for a link to the same page. `request.url` is not
    used, because it contains the decoded path. A question mark in this path would look like the
    start of the query."""
    query = request.scope["query_string"].decode("latin-1")
    return own_path(quote(request.scope["path"]) + (f"?{query}" if query else ""))
