"""The links for the login, on an output that is read, closed or stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from fakevllm.console.access.link_output import MAX_WAITING, LinkOutput

LINE = "console: open http://127.0.0.1:8010/login?code=x"
MAX_WAIT_S = 10.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe: the file descriptor from which one reads, and the stream to which one writes."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
        os.close(reader)


def wait_for_log(caplog: pytest.LogCaptureFixture, words: str) -> None:
    end = time.monotonic() + MAX_WAIT_S
    while words not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert words in caplog.text


def test_a_link_is_one_line_of_the_output(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    LinkOutput(stream).write(LINE)
    assert os.read(reader, 1000).decode() == f"{LINE}\n"


def test_a_link_is_in_the_log_if_the_output_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        output = LinkOutput(stream)
        output.write(LINE)
        wait_for_log(caplog, LINE)
        output.write("the next line")
        wait_for_log(caplog, "the next line")


def test_a_link_is_in_the_log_if_there_is_no_output(caplog: pytest.LogCaptureFixture) -> None:
    LinkOutput(None).write(LINE)
    wait_for_log(caplog, LINE)


def test_an_output_that_nobody_reads_does_not_stop_the_console(
    pipe: tuple[int, TextIO], caplog: pytest.LogCaptureFixture
) -> None:
    reader, stream = pipe
    output = LinkOutput(stream)
    long_line = "x" * 2**17  # a pipe takes 64 KiB
    start = time.monotonic()
    for _ in range(MAX_WAITING + 2):
        output.write(long_line)
    assert time.monotonic() - start < MAX_WAIT_S
    wait_for_log(caplog, "the standard output is too slow")
    data = os.read(reader, 2**17)
    while data.count(b"\n") < MAX_WAITING:
        data += os.read(reader, 2**17)
    output.write("the last line")
    while not data.endswith(b"the last line\n"):
        data += os.read(reader, 2**17)
    assert data.count(b"\n") in (MAX_WAITING + 1, MAX_WAITING + 2)
