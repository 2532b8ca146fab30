"""Render the console's pages from templates. All values in the templates are escaped. The module
also formats the numbers and times on the pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from fakevllm.console.access.own_path import path_of
from fakevllm.console.page_texts import PageTexts
from fakevllm.console.terms import TERMS
from fakevllm.overwatch.formatting import format_duration

FOLDER = Path(__file__).parent
TEMPLATES = FOLDER / "templates"
STATIC = FOLDER / "static"
FRAGMENT_HEADER = "hx-request"
"""Header with which htmx requests only the part of a page that changes."""
TEXTS = "texts"
"""Name of the value of a template that cuts its texts."""
TENTHS_BELOW_S = 10.0
"""Durations below this number of seconds are shown with tenths of a second."""
_LIVE_BLOCK = "live"
_COMMAND = re.compile(r"`([^`]+)`")


class PageRenderer:
    """Renders templates. A request by htmx gets only the block `live` of the template, so a page
    and its updates have the same URL."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters: dict[str, Callable[..., str]] = {
            "time": time_text,
            "number": number_text,
            "json": _json,
            "cut": _cut,
            "first_line": first_line,
            "prose": prose,
            "urlencode_path": path_part,
            "duration": duration_text,
            "meaning": TERMS.__getitem__,
        }
        self._environment.filters.update(filters)

    def page(
        self, request: Request, template: str, *, status: int = 200, **values: object
    ) -> Response:
        """Return the response with a page, or with its block `live` if htmx requests it."""
        found = self._environment.get_template(template)
        standard = {"path": request.url.path, "own_path": path_of(request), TEXTS: PageTexts()}
        values = standard | values
        if FRAGMENT_HEADER in request.headers and _LIVE_BLOCK in found.blocks:
            context = found.new_context(values)
            html = "".join(found.blocks[_LIVE_BLOCK](context))
        else:
            html = found.render(values)
        # JSON may have half of a surrogate pair, such as "\\ud800", which UTF-8 does not have.
        return HTMLResponse(html.encode("utf-8", "replace"), status)


def path_part(text: str) -> str:
    """Return a text as one part of a URL's path.

    >>> path_part("a/b?")
    'a%2Fb%3F'
    """
    return quote(text, safe="")


def time_text(seconds: float | None) -> str:
    """Return a time in Unix seconds as local time."""
    try:
        return "–" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # translates: not a time of this calendar
        return "–"


def prose(text: str) -> Markup:
    """Return a message as HTML. Messages are also written to terminals, and mark commands with
    backticks.

    >>> prose("run `fakevllm up` <now>")
    Markup('run <code>fakevllm up</code> &lt;now&gt;')
    """
    return Markup(_COMMAND.sub(r"<code>\1</code>", str(escape(text))))


def number_text(value: float | None) -> str:
    """Return a reward or another real number.

    >>> number_text(0.5), number_text(None)
    ('0.500', '–')
    """
    return "–" if value is None else f"{value:.3f}"


def duration_text(seconds: float | None) -> str:
    """Return a duration in seconds, minutes, hours or days.

    >>> duration_text(0.25), duration_text(150.0), duration_text(None)
    ('0.2 s', '2 min', '–')
    """
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < TENTHS_BELOW_S else format_duration(seconds)


@pass_context
def _json(context: Context, text: str | None) -> str:
    return _texts(context).json(text)


@pass_context
def _cut(context: Context, text: str) -> str:
    return _texts(context).cut(text)


def _texts(context: Context) -> PageTexts:
    texts = context[TEXTS]
    assert isinstance(texts, PageTexts), "the value `texts` of a template cuts its texts"
    return texts


def first_line(text: str, num_chars: int = 120) -> str:
    """Return a text in one line of at most `num_chars` characters.

    >>> first_line("one\\n two three", 8)
    'one two…'
    """
    line = " ".join(text.split())
    return line if len(line) <= num_chars else f"{line[: num_chars - 1].rstrip()}…"
