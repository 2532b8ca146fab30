"""The dataset rows to which requests belong, with their right answers. The methods block the
thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakevllm.admission.dataset import IndexedDataset
from fakevllm.errors import ConfigError
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger

ANSWER_FIELD = "answer"
"""Name of the field that has the right answer by convention. The hook `exact_match` reads it."""
_MESSAGES_FIELD = "messages"
MAX_FILE_BYTES = 200_000_000
"""Size of a dataset file above which its rows are not shown. The first page that needs a row reads
the whole file, which takes about a second for a file of this size."""

log = logging.getLogger("fakevllm.console.sources.dataset_rows")


class DatasetRows:
    """The rows of datasets that were registered at the proxy, and the rows of dataset files.
    Threads may share the object."""

    def __init__(self, ledger: ReadOnlyLedger, files: Sequence[Path], text_field: str) -> None:
        """`files` are files in JSON Lines. `text_field` is the field with the text of a row."""
        self._ledger = ledger
        self._files = [IndexedDataset(file, MAX_FILE_BYTES) for file in files]
        self._text_field = text_field

    def registered(self, row_id: str) -> list[tuple[str, str]] | None:
        """Return the fields of a registered row without its text, as pairs of name and text. Return
        None if the row is not registered. Call the method in a `with` block of
        `ReadOnlyLedger.reading`."""
        task = self._ledger.recorded_groups.task(row_id)
        return None if task is None else self._shown(task.metadata)

    def in_files(self, row_id: str) -> list[tuple[str, str]]:
        """Return the fields of a row of a file without its text. Return [] if no file has the row.
        Call the method outside of `ReadOnlyLedger.reading`, because it may read a large file."""
        for file in self._files:
            try:
                row = file.find_row(row_id)
            except ConfigError as error:  # isolates: the page is shown without the row
                log.warning("a dataset row is not shown: %s", error)
                continue
            if row is not None:
                return self._shown(row)
        return []

    def _shown(self, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
        return field_texts(fields, {self._text_field, _MESSAGES_FIELD})


def field_texts(fields: Mapping[str, Any], left_out: set[str]) -> list[tuple[str, str]]:
    """Return the fields of a row as pairs of texts. The field with the right answer comes first.

    >>> field_texts({"question": "1+1?", "level": 3, "answer": "2"}, {"question"})
    [('answer', '2'), ('level', '3')]
    """
    names = sorted((name for name in fields if name not in left_out), key=_is_other)
    return [(name, _text(fields[name])) for name in names]


def _is_other(name: str) -> bool:
    return name != ANSWER_FIELD


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
