"""The opencode example's commands: their errors and exit codes, with a fake opencode."""

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

from examples.opencode.opencode_command import PACKAGE, locate_command
from tests.e2e.processes import free_port
from tests.examples.fake_opencode import Handler, write_command
from tests.examples.webchat_app import ROOT

README = Path(__file__).parents[2] / "examples/opencode/README.md"


def test_a_relative_command_becomes_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin/opencode"
    command.parent.mkdir()
    command.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    assert locate_command("bin/opencode") == str(command)


def test_a_missing_opencode_causes_a_message_with_the_command_to_install_it() -> None:
    with pytest.raises(SystemExit, match=f"npm install -g {PACKAGE}"):
        locate_command("no-such-opencode")


def test_the_readme_installs_the_tested_version() -> None:
    assert f"    npm install -g {PACKAGE}\n" in README.read_text()


FAILED = {"error": {"name": "APIError", "data": {"message": "Not Found"}}}


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"examples.opencode.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@contextmanager
def model_server() -> Generator[str]:
    """Run a server that lists a model at `/v1/models`; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run_users(url: str, opencode: str) -> subprocess.CompletedProcess[str]:
    flags = ["--url", url, "--opencode", opencode, "--sessions", "3"]
    return script("mock_user_request", *flags)


def test_users_without_a_proxy_get_one_line_before_opencode_starts(
    tmp_path: Path,
) -> None:
    opencode = write_command(tmp_path, FAILED)
    nowhere = f"http://127.0.0.1:{free_port()}/v1"
    with model_server() as server:
        for url in (nowhere, server, "127.0.0.1:8000/v1"):
            done = run_users(url, opencode)
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"No proxy answers at {url} ("), line
            assert line.endswith(
                ": start `fakevllm up` or `fakevllm serve`, or set --url http://HOST:PORT/v1."
            )
            assert (done.returncode, done.stdout) == (2, "")


def test_users_report_the_first_error_once_and_exit_with_1_if_every_turn_fails(
    tmp_path: Path,
) -> None:
    with model_server() as server:
        done = run_users(f"{server}/v1", write_command(tmp_path, FAILED))
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("APIError: Not Found") == 1
    assert re.search(r"(\d) turns, 0% passed their test; \1 failed\n$", done.stdout), done.stdout


def test_users_exit_with_0_if_turns_succeed(tmp_path: Path) -> None:
    with model_server() as server:
        done = run_users(f"{server}/v1", write_command(tmp_path, {}))
    assert done.returncode == 0, done.stderr
    assert "0 failed\n" in done.stdout and "The first" not in done.stdout


def test_an_active_client_without_a_server_gets_one_line(tmp_path: Path) -> None:
    opencode = write_command(tmp_path, FAILED)
    for url in (f"http://127.0.0.1:{free_port()}", "127.0.0.1:10086"):
        done = script("active_client", "--swarm-url", url, "--opencode", opencode)
        (line,) = done.stderr.splitlines()
        assert f"No swarm server answers at {url} (" in line and "--swarm-url" in line
        assert "`fakevllm-server start ...`" in line
        assert (done.returncode, done.stdout) == (2, "")
