"""The output of child processes, line by line and in files."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.processes.output import (
    MAX_LINE_BYTES,
    LineOutput,
    LineSplitter,
    LogFile,
    last_line,
)

PROGRAM = "import sys; print('one'); sys.stderr.write('two\\nthe end')"


@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_lines_do_not_depend_on_the_chunks_in_which_they_arrive(
    text: bytes, cuts: list[int]
) -> None:
    splitter, lines = LineSplitter(), list[str]()
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        lines += splitter.feed(text[start:end])
    lines += splitter.end()
    whole = LineSplitter()
    assert lines == [*whole.feed(text), *whole.end()]


def test_output_without_a_line_break_is_split_and_nothing_is_lost() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 5))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES] * 2
    assert splitter.end() == ["xxxxx"]


def run(output: LineOutput | LogFile) -> None:
    fd = output.open()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=fd, stderr=fd, check=True)
    finally:
        os.close(fd)
    output.finish()


def test_every_line_of_a_process_is_passed_on_and_the_last_one_is_remembered() -> None:
    lines: list[str] = []
    output = LineOutput(lines.append)
    assert output.last_line() == "it printed nothing"
    run(output)
    assert sorted(lines) == ["one", "the end", "two"]
    assert output.last_line() == lines[-1]


def test_a_log_file_is_appended_to_and_named_in_messages(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.touch()
    output = LogFile(file)
    assert output.last_line() == "its log is empty"
    run(output)
    run(output)
    assert file.read_text().count("one\n") == 2 and output.hint == f" (see {file})"


def test_the_last_line_of_a_large_log_is_found_and_blank_lines_do_not_count(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.log"
    file.write_text("first\n" + "x" * 3 * MAX_LINE_BYTES + "\nthe reason\n\n \n")
    assert last_line(file) == "the reason"
    file.write_text("y" * 3 * MAX_LINE_BYTES)
    assert last_line(file) == "y" * MAX_LINE_BYTES
    file.write_text("\n")
    assert last_line(file) is None


def test_a_blank_last_line_of_a_process_is_not_its_reason() -> None:
    output = LineOutput(lambda line: None)
    fd = output.open()
    os.write(fd, b"the reason\n\n")
    os.close(fd)
    output.finish()
    assert output.last_line() == "the reason"
