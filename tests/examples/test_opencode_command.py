"""opencode's command, as a newcomer has it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.opencode.recorded import PACKAGE, found
from tests.e2e.processes import free_port
from tests.examples.odd_opencode import Answers, command_of
from tests.examples.webchats import ROOT

README = Path(__file__).parents[2] / "examples/opencode/README.md"


def test_a_command_named_from_here_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin/opencode"
    command.parent.mkdir()
    command.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    assert found("bin/opencode") == str(command)


def test_who_has_no_opencode_is_told_what_installs_it() -> None:
    with pytest.raises(SystemExit, match=f"npm install -g {PACKAGE}"):
        found("no-such-opencode")


def test_the_readme_installs_the_version_the_example_was_tried_with() -> None:
    assert f"npm install -g {PACKAGE} " in README.read_text()


FAILED = {"error": {"name": "APIError", "data": {"message": "Not Found"}}}


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"examples.opencode.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@contextmanager
def model_server() -> Generator[str]:
    """One that lists a model at `/v1/models`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def users(url: str, opencode: str) -> subprocess.CompletedProcess[str]:
    flags = ["--url", url, "--opencode", opencode, "--sessions", "3"]
    return script("mock_user_request", *flags)


def test_users_who_have_no_proxy_are_told_in_a_line_before_opencode_is_started(
    tmp_path: Path,
) -> None:
    opencode = command_of(tmp_path, FAILED)
    nowhere = f"http://127.0.0.1:{free_port()}/v1"
    with model_server() as server:
        for url in (nowhere, server, "127.0.0.1:8000/v1"):
            told = users(url, opencode)
            (line,) = told.stderr.splitlines()
            assert line.startswith(f"No proxy answers at {url} ("), line
            assert "start `fakevllm serve`, or --url http://HOST:PORT/v1" in line
            assert (told.returncode, told.stdout) == (2, "")


def test_users_of_a_model_that_fails_each_turn_say_why_once_and_end_with_1(tmp_path: Path) -> None:
    with model_server() as server:
        told = users(f"{server}/v1", command_of(tmp_path, FAILED))
    assert told.returncode == 1, told.stderr
    assert told.stdout.count("APIError: Not Found") == 1
    assert re.search(r"(\d) turns, 0% passed their test; \1 failed\n$", told.stdout), told.stdout


def test_users_whose_turns_are_answered_end_with_0(tmp_path: Path) -> None:
    with model_server() as server:
        told = users(f"{server}/v1", command_of(tmp_path, {}))
    assert told.returncode == 0, told.stderr
    assert "0 failed\n" in told.stdout and "The first" not in told.stdout


def test_an_active_client_without_a_server_is_told_in_a_line(tmp_path: Path) -> None:
    opencode = command_of(tmp_path, FAILED)
    for url in (f"http://127.0.0.1:{free_port()}", "127.0.0.1:10086"):
        told = script("active", "--swarm-url", url, "--opencode", opencode)
        (line,) = told.stderr.splitlines()
        assert f"No swarm server answers at {url} (" in line and "--swarm-url" in line
        assert "`fakevllm-server start ...`" in line
        assert (told.returncode, told.stdout) == (2, "")
