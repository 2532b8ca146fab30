"""The lines of several programs on one stream."""

from __future__ import annotations

import io
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.up import log_lines
from fakevllm.up.log_lines import MAX_WAITING_BYTES, LineWriter, PrefixedLines, is_colored

NAMES = ("server", "proxy")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_begin_at_the_same_column() -> None:
    lines = PrefixedLines("up", NAMES, is_colored=False)
    assert [lines.format(name, "x") for name in (*NAMES, "up")] == [
        "server | x",
        "proxy  | x",
        "up     | x",
    ]


def test_on_a_terminal_each_program_has_a_colour_of_its_own() -> None:
    lines = PrefixedLines("up", NAMES, is_colored=True)
    colors = {re.findall(r"\x1b\[(\d+)m", lines.format(name, "x"))[0] for name in (*NAMES, "up")}
    assert len(colors) == 3
    assert lines.format("server", "x").endswith("server |\x1b[0m x")


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [(Terminal(), {}, True), (Terminal(), {"NO_COLOR": "1"}, False), (io.StringIO(), {}, False)],
)
def test_lines_are_coloured_only_on_a_terminal_that_wants_it(
    stream: io.StringIO, environment: dict[str, str], expected: bool
) -> None:
    assert is_colored(stream, environment) is expected


@given(text=st.text())
def test_a_line_of_a_program_cannot_control_the_terminal(text: str) -> None:
    line = PrefixedLines("up", NAMES, is_colored=False).format("proxy", text)
    assert line.replace("\t", "").isprintable() and len(line) == len("proxy  | ") + len(text)


def read(fd: int) -> bytes:
    """Return all that is written into a pipe until its last writer closes it."""
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def test_characters_that_the_terminal_cannot_show_are_replaced() -> None:
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, "ascii", closes_fd=True)
    writer.write("wörld")
    writer.join()
    assert read(read_end) == b"w?rld\n"


def test_the_last_bytes_come_after_all_lines_and_nothing_comes_after_them() -> None:
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, closes_fd=True)
    writer.write("one")
    writer.end(b"end\n")
    writer.write("two")
    writer.join()
    assert read(read_end) == b"one\nend\n"


def test_an_output_that_is_gone_stops_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = LineWriter(write_end, closes_fd=True)
    writer.write("one")
    writer.join()
    with pytest.raises(OSError):
        os.fstat(write_end)


def test_an_output_that_nobody_reads_blocks_nothing_and_lost_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_lines, "JOIN_TIMEOUT_S", 0.1)
    read_end, write_end = os.pipe()
    writer = LineWriter(write_end, closes_fd=True)
    line = "x" * 9_999
    num_lines = 2 * MAX_WAITING_BYTES // len(line)
    for _ in range(num_lines):
        writer.write(line)
    writer.end(b"end\n")
    writer.join()
    *lines, note, last = read(read_end).decode().splitlines()
    assert set(lines) == {line} and last == "end"
    assert note.startswith(f"({num_lines - len(lines)} lines are missing here")
    assert MAX_WAITING_BYTES <= 10_000 * len(lines) < 1.1 * MAX_WAITING_BYTES
