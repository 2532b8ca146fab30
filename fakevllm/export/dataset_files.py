"""Write rows to a dataset file, in JSON Lines or Parquet. At most one row group is in memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from fakevllm.errors import ConfigError, UserError
from fakevllm.export.columns import Columns, ColumnType, typed_row
from fakevllm.runtime.new_file import new_file

ROW_GROUP_BYTES = 8 << 20
"""Size of a row group of a Parquet file before compression. Smaller groups compress less well."""
MAX_ROW_GROUP_ROWS = 5000
"""Maximum number of rows of a row group."""

Json = dict[str, Any]
EncodedRow = Any
"""A row in the form that a file's method `write` takes."""


class RowFile(Protocol):
    """A file that rows are written to."""

    def encode(self, row: Json) -> EncodedRow:
        """Return the row in the form that `write` takes. Raises TypeError if this type of file
        cannot store the row."""
        ...

    def write(self, row: EncodedRow) -> None:
        """Write an encoded row to the file, or keep it in memory until more rows follow. Raises
        OSError if the disk fails."""
        ...

    def finish(self) -> None:
        """Write the rows that are still in memory, and the end of the file. Raises OSError if the
        disk fails."""
        ...

    def abort(self) -> None:
        """Stop writing the file after an error. This method never raises."""
        ...


class JsonLinesFile:
    """A file with one JSON object for each row."""

    def __init__(self, file: IO[bytes], columns: Columns) -> None:
        self._file = file
        self._columns = columns

    def encode(self, row: Json) -> bytes:
        return orjson.dumps(typed_row(row, self._columns), option=orjson.OPT_APPEND_NEWLINE)

    def write(self, row: bytes) -> None:
        self._file.write(row)

    def finish(self) -> None:
        self._file.flush()

    def abort(self) -> None:
        pass


class ParquetFile:
    """A Parquet file. JSON objects have Arrow's type `arrow.json`, so that each object keeps its
    own keys. The package `datasets` reads this type as its feature `Json`.

    Raises UserError if pyarrow is not installed.
    """

    def __init__(self, file: IO[bytes], columns: Columns) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise UserError(
                f"A Parquet file needs the package pyarrow ({error}): in the folder of the clone, "
                "run pip install -c constraints.txt -e '.[parquet]'. A file whose name ends with "
                ".jsonl needs no package."
            ) from None
        self._columns = columns
        fields = [(name, self._type(column_type)) for name, column_type in columns.items()]
        self._schema = self._arrow.schema(fields)
        self._writer = parquet.ParquetWriter(file, self._schema)
        self._rows: list[Json] = []
        self._num_bytes = 0

    def encode(self, row: Json) -> Json:
        typed = typed_row(row, self._columns)
        return {name: _encoded(value, self._columns[name]) for name, value in typed.items()}

    def write(self, row: Json) -> None:
        self._rows.append(row)
        self._num_bytes += sum(map(_num_bytes, row.values()))
        if self._num_bytes >= ROW_GROUP_BYTES or len(self._rows) >= MAX_ROW_GROUP_ROWS:
            self._write_row_group()

    def finish(self) -> None:
        if self._rows:
            self._write_row_group()
        self._writer.close()

    def abort(self) -> None:
        try:
            self._writer.close()
        except Exception:  # the disk is full, for example, which the caller reports
            self._writer.is_open = False  # otherwise its destructor closes it again, and prints

    def _write_row_group(self) -> None:
        arrays = [
            self._array([row[name] for row in self._rows], column_type)
            for name, column_type in self._columns.items()
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._num_bytes = [], 0

    def _array(self, values: list[Any], column_type: ColumnType) -> Any:
        """Return the values of a column as an Arrow array. An array of JSON objects is created from
        JSON texts, because Arrow cannot create it from Python values."""
        arrow = self._arrow
        match column_type:
            case ColumnType.OBJECT:
                texts = arrow.array(values, arrow.string())
                return arrow.ExtensionArray.from_storage(arrow.json_(), texts)
            case ColumnType.OBJECTS:
                lists = arrow.array(values, arrow.list_(arrow.string()))
                objects = arrow.ExtensionArray.from_storage(arrow.json_(), lists.values)
                return arrow.ListArray.from_arrays(lists.offsets, objects, mask=lists.is_null())
            case _:
                return arrow.array(values, self._type(column_type))

    def _type(self, column_type: ColumnType) -> Any:
        arrow = self._arrow
        match column_type:
            case ColumnType.TEXT:
                return arrow.string()
            case ColumnType.INTEGER:
                return arrow.int64()
            case ColumnType.NUMBER:
                return arrow.float64()
            case ColumnType.FLAG:
                return arrow.bool_()
            case ColumnType.OBJECT:
                return arrow.json_()
            case ColumnType.OBJECTS:
                return arrow.list_(arrow.json_())


def _encoded(value: Any, column_type: ColumnType) -> Any:
    if value is None:
        return None
    match column_type:
        case ColumnType.OBJECT:
            return orjson.dumps(value).decode()
        case ColumnType.OBJECTS:
            return [orjson.dumps(each).decode() for each in value]
        case _:
            return value


def _num_bytes(value: object) -> int:
    """Return the approximate size of an encoded value."""
    if isinstance(value, list):
        return sum(len(text) for text in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return len(value) if isinstance(value, str) else 8


FILE_TYPES: dict[str, Callable[[IO[bytes], Columns], RowFile]] = {
    ".jsonl": JsonLinesFile,
    ".parquet": ParquetFile,
}
"""The types of files, by the ending of the file's name."""


@contextmanager
def dataset_file(target: Path, columns: Columns) -> Generator[RowFile]:
    """Yield a file that rows can be written to. The file gets the name `target` when the `with`
    block ends. If the block raises an exception, no file is written.

    Raises ConfigError if the file cannot be written.
    """
    file_type = FILE_TYPES.get(target.suffix)
    if file_type is None:
        raise ConfigError(
            f"--to {target} has an unknown type: end its name with {' or '.join(FILE_TYPES)}."
        )
    with new_file(target) as file:
        rows = file_type(file, columns)
        try:
            yield rows
            rows.finish()
        except BaseException:
            rows.abort()
            raise
