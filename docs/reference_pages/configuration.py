"""The page that lists the keys of fakevllm.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from docs.reference_pages import docstrings
from docs.reference_pages.fields import HEAD, rows_of
from docs.reference_pages.markdown import Page, code, prose, section, table
from docs.reference_pages.serve_flags import serve_flags
from fakevllm.config.model import Config, LimitsSection
from fakevllm.config.serving import RouteRules, ServeRules
from fakevllm.config.setting_origins import ENVIRONMENT_VARIABLES
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.job.model import TrainJob

INTRODUCTION = """\
This page lists every key of `fakevllm.toml`, with its type, default and unit. \
[Configuration](../configuration.md) explains how the keys work together, and has the whole file \
with its defaults. A key that has the default *none* is not set. The column *flag* names the flag \
of [`fakevllm serve`](commands.md#fakevllm-serve) that sets the same key.

The keys of `[job]` are on [a page of their own](job.md). The keys of `[server]` are the flags of \
[`fakevllm-server start`](commands.md#fakevllm-server-start)."""
_DESCRIBED_ELSEWHERE: Mapping[type[BaseModel], type] = {
    LimitsSection: Limits,
    RouteRules: ServeRules,
}
"""Sections whose fields have their docstrings in another class."""


def page() -> Page:
    """Return the page with one section per table of fakevllm.toml."""
    return Page("Configuration keys", INTRODUCTION, list(_sections(Config, "")))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = _model_in(field.annotation)
        if below is None or below is TrainJob:
            continue
        kind = get_origin(field.annotation)
        place = f"{prefix}{name}.NAME" if kind is dict else f"{prefix}{name}"
        yield _section(below, f"[[{place}]]" if kind is tuple else f"[{place}]", place)
        yield from _sections(below, f"{place}.")


def _section(model: type[BaseModel], title: str, key: str) -> str:
    elsewhere = _DESCRIBED_ELSEWHERE.get(model)
    rows = rows_of(model, docstrings.of_class(elsewhere) if elsewhere is not None else None)
    cells = [[code(row.name), *row.cells, *_flag_and_variable(f"{key}.{row.name}")] for row in rows]
    meaning = docstrings.text_of(model.__doc__)
    head = ["key", *HEAD, "flag", "environment variable"]
    return section(code(title), prose(meaning), table(head, cells))


def _flag_and_variable(key: str) -> list[str]:
    found = (serve_flags().get(key), ENVIRONMENT_VARIABLES.get(key))
    return ["" if name is None else code(name) for name in found]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a section, or the model of the entries of a list or table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for one in get_args(annotation) if (model := _model_in(one))), None)
