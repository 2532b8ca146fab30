"""Messages about files and folders that a process may not use."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import typer

from fakevllm_runtime.commands import run_command
from fakevllm_runtime.path_access import unusable_message


def error(code: int, path: Path | None = None) -> OSError:
    text = os.strerror(code)
    return OSError(code, text) if path is None else OSError(code, text, str(path))


def test_a_read_only_file_system_is_to_be_mounted_differently(tmp_path: Path) -> None:
    assert unusable_message(tmp_path, error(errno.EROFS), "choose another --run-dir") == (
        f"{tmp_path} cannot be used (Read-only file system): mount its file system so that it can "
        "be written, or choose another --run-dir."
    )


def test_the_nearest_folder_above_a_missing_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    missing = tmp_path / "a" / "b"
    message = unusable_message(missing, error(errno.EACCES, missing), "choose another --run-dir")
    assert message.startswith(f"{missing} cannot be used (Permission denied): {tmp_path} belongs")
    assert "this process runs as the user 54321" in message
    existing = unusable_message(tmp_path, error(errno.EACCES, tmp_path), "choose another --run-dir")
    assert existing.endswith(f"`chown -R 54321 {tmp_path}`, or choose another --run-dir.")
    monkeypatch.setattr(os, "geteuid", lambda: own)
    assert f"`chmod u+rwX {tmp_path}`" in unusable_message(missing, error(errno.EPERM), "stop")


def test_no_command_changes_the_owner_of_a_system_folder_above_a_missing_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    missing = Path("/no such folder/runs")
    message = unusable_message(missing, error(errno.EACCES, missing), "choose another --run-dir")
    assert "(Permission denied): / belongs to the user root" in message
    assert message.endswith(": let this user use it, or choose another --run-dir.")
    assert "chown" not in message


def test_other_errors_have_no_remedy_of_their_own(tmp_path: Path) -> None:
    message = unusable_message(tmp_path, error(errno.ENOTDIR), "choose another --run-dir")
    assert message == f"{tmp_path} cannot be used (Not a directory): choose another --run-dir."


def test_a_command_that_may_not_use_a_file_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error(errno.EROFS, tmp_path)

    with pytest.raises(typer.Exit) as ended:
        run_command(run, "program")
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"program: {tmp_path} cannot be used (Read-only file system): mount")


def test_other_errors_of_the_system_are_not_hidden() -> None:
    def run() -> None:
        raise error(errno.EIO, Path("a"))

    with pytest.raises(OSError, match="Input/output error"):
        run_command(run)
