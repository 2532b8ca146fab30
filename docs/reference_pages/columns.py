"""The pages that list the columns of the two SQLite files: the ledger and the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Table
from sqlalchemy.dialects import sqlite
from sqlmodel import SQLModel

from docs.reference_pages import docstrings
from docs.reference_pages.markdown import Page, code, prose, section, table
from fakevllm.ledger import tables as ledger
from fakevllm.ledger.counters import SessionTotals, StepSums
from fakevllm.ledger.records import (
    FeedbackRecord,
    GroupRecord,
    KeptAnswer,
    SiblingRecord,
    StoredResponse,
)
from fakevllm_server.journal import tables as journal

LEDGER = """\
This page lists every column of the ledger, the proxy's SQLite file `ledger.sqlite`. \
[The ledger](../../fakevllm/ledger/README.md) explains what the file promises and how the views \
are put together, [Asking the ledger](../ledger.md) has queries, and \
[States and reasons](codes.md) lists the values of `state`, `reason`, `kind`, `evidence` and \
`arm`. Query the views `groups`, `siblings` and `calls` \
instead of the tables `group_rows`, `sibling_rows` and `call_rows`."""
JOURNAL = """\
This page lists every column of the journal, the SQLite file `journal.sqlite` in the server's run \
directory. [The journal](../../server/fakevllm_server/journal/README.md) explains what is written \
when, and how long rows are kept."""
_HEAD = ("column", "type", "key", "NULL", "meaning")
_RECORDS: Mapping[str, type] = {
    "groups": GroupRecord,
    "siblings": SiblingRecord,
    "feedback": FeedbackRecord,
    "group_rows": GroupRecord,
    "sibling_rows": SiblingRecord,
    "kept_answers": KeptAnswer,
    "responses": StoredResponse,
    "step_counters": StepSums,
    "session_counters": SessionTotals,
}
"""Class whose fields describe the columns of a table of the ledger."""


def ledger_page() -> Page:
    """Return the page with the views and tables of the ledger."""
    meanings = docstrings.of_module(ledger)
    found = {value.name: (name, value) for name, value in vars(ledger).items() if _is_table(value)}
    names = (*ledger.VIEWS.tables, *ledger.METADATA.tables)
    sections = [
        _section(
            one,
            meanings[constant],
            docstrings.of_class(_RECORDS[name]) if name in _RECORDS else {},
        )
        for name in names
        for constant, one in (found[name],)
    ]
    return Page("Columns of the ledger", LEDGER, sections)


def journal_page() -> Page:
    """Return the page with the tables of the journal."""
    return Page("Columns of the journal", JOURNAL, list(_journal_sections()))


def _journal_sections() -> Iterable[str]:
    for model in vars(journal).values():
        if isinstance(model, type) and issubclass(model, SQLModel):
            written: Table | None = getattr(model, "__table__", None)
            if written is not None:
                meaning = docstrings.text_of(model.__doc__)
                yield _section(written, meaning, docstrings.of_class(model))


def _is_table(value: object) -> bool:
    return isinstance(value, Table)


def _section(one: Table, meaning: str, described: Mapping[str, str]) -> str:
    rows: list[list[str]] = []
    for column in one.columns:
        text = column.comment or described.get(column.name)
        if text is None:
            raise ValueError(f"{one.name}.{column.name} has no description: write its docstring")
        rows.append(
            [
                code(column.name),
                column.type.compile(dialect=sqlite.dialect()),
                "primary" if column.primary_key else "",
                "may be NULL" if column.nullable else "",
                prose(text),
            ]
        )
    return section(code(one.name), prose(meaning), table(_HEAD, rows))
