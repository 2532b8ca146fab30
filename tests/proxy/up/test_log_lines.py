"""The lines of several programs on one stream."""

from __future__ import annotations

import io
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.up.log_lines import LineWriter, PrefixedLines, is_colored

NAMES = ("server", "proxy")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError("the terminal is gone")


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


def test_characters_that_the_terminal_cannot_show_are_replaced() -> None:
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, encoding="ascii")
    LineWriter(terminal).write("wörld")
    assert shown.getvalue() == b"w?rld\n"


def test_a_closed_terminal_does_not_stop_the_writer() -> None:
    read_end, write_end = os.pipe()
    writer = LineWriter(ClosedTerminal())
    writer.copy_to(write_end)
    writer.write("one")
    writer.end_copy(b"end\n")
    writer.write("two")
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"one\nend\n"


def test_a_copy_that_nobody_reads_ends_and_lines_are_still_written() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.copy_to(write_end)
    for line in ("one", "two"):
        writer.write(line)
    writer.end_copy(b"end\n")
    assert stream.getvalue() == "one\ntwo\n"
