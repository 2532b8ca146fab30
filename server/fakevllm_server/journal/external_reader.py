"""Read a journal file, the server's SQLite file, from another process or thread. A server may be
writing to the file at the same time.

The file is not changed. Reading takes no lock that could make the server wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, NullPool, create_engine
from sqlalchemy.exc import DatabaseError

from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.read_only import connect_read_only

P = ParamSpec("P")
T = TypeVar("T")


def read_journal_file(
    journal: Path,
    query: Callable[Concatenate[Connection, P], T],
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Open a journal file, call `query` with the database connection, and return the result.
    `query` can be any function of the module `reads`.

    Raises ConfigError if the file cannot be read.
    """
    engine = create_engine(
        "sqlite://", creator=lambda: connect_read_only(journal), poolclass=NullPool
    )
    try:
        with engine.connect() as db:
            return query(db, *arguments, **named)
    except DatabaseError as error:
        raise ConfigError(
            f"The journal {journal} cannot be read ({error.orig}): was it written by another "
            "version?"
        ) from error
