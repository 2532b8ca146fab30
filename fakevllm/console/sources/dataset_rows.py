"""The dataset rows to which requests belong, with their right answers. The methods block the
thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakevllm.admission.dataset import find_row
from fakevllm.errors import ConfigError
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger

ANSWER_FIELD = "answer"
"""Name of the field that has the right answer by convention. The hook `exact_match` reads it."""
_MESSAGES_FIELD = "messages"

log = logging.getLogger("fakevllm.console.sources.dataset_rows")


class DatasetRows:
    """The rows of datasets that were registered at the proxy, and the rows of dataset files."""

    def __init__(self, ledger: ReadOnlyLedger, files: Sequence[Path], text_field: str) -> None:
        """`files` are files in JSON Lines. `text_field` is the field with the text of a row."""
        self._ledger = ledger
        self._files = files
        self._text_field = text_field

    def fields(self, row_id: str) -> list[tuple[str, str]]:
        """Return the fields of a row without its text, as pairs of name and text. Return [] if the
        row is unknown. Call the method in a `with` block of `ReadOnlyLedger.reading`."""
        task = self._ledger.recorded_groups.task(row_id)
        if task is not None:
            return field_texts(task.metadata, {self._text_field, _MESSAGES_FIELD})
        for file in self._files:
            try:
                row = find_row(file, row_id)
            except ConfigError as error:  # isolates: the page is shown without the row
                log.warning("a dataset row is not shown: %s", error)
                continue
            if row is not None:
                return field_texts(row, {self._text_field, _MESSAGES_FIELD})
        return []


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
