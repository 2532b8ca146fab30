"""opencode's command, as a newcomer has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.opencode.recorded import PACKAGE, found

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
