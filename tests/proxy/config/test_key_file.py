"""The key file on disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fakevllm.config.key_file import KeyFile, console_lacks_key_file
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import named_key


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_the_file_and_the_folder_created_for_it(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "run" / "keys")
    assert file.entries() == []
    file.add(named_key("sk-one", "app", "today"))
    assert mode(file.path) == 0o600 and mode(file.path.parent) == 0o700
    assert [entry.name for entry in file.path.parent.iterdir()] == ["keys"]
    assert "sk-one" not in file.path.read_text()


def test_plain_text_keys_stay_and_the_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nsk-plain")
    path.chmod(0o644)
    file = KeyFile(path)
    file.add(named_key("sk-one", "app", "today"))
    file.revoke("app", "later")
    assert path.read_text().splitlines()[:2] == ["# mine", "sk-plain"]
    assert mode(path) == 0o600
    assert [(key.name, key.revoked) for key in file.entries()] == [(None, None), ("app", "later")]


@pytest.mark.parametrize(
    ("host", "is_public"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("gpu", True)],
)
def test_a_console_that_others_can_reach_needs_a_key_file(host: str, is_public: bool) -> None:
    assert console_lacks_key_file(None, host) is is_public
    assert not console_lacks_key_file(Path("keys"), host)


def test_a_symbolic_link_is_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("sk-plain\n")
    link.symlink_to(real)
    KeyFile(link).add(named_key("sk-one", "app", "today"))
    assert link.is_symlink() and len(real.read_text().splitlines()) == 2


def test_errors_for_a_second_key_and_an_unknown_name_contain_the_fix(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"app has no key in .*: it has no named key"):
        file.revoke("app", "later")
    file.add(named_key("sk-one", "app", "today"))
    with pytest.raises(ConfigError, match=r"`fakevllm keys revoke app --key-file .*/keys`"):
        file.add(named_key("sk-two", "app", "today"))
    with pytest.raises(ConfigError, match=r"other has no key in .*: its named keys are app\. "):
        file.revoke("other", "later")


def test_an_unusable_file_is_reported_in_one_line_and_left_unchanged(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "taken" / "keys", "Not a directory"),
        (tmp_path / "odd", "not UTF-8 text"),
        (tmp_path / "damaged", "line 1 is not"),
    ):
        (tmp_path / "taken").write_text("")
        (tmp_path / "odd").write_bytes(b"\xff\n")
        (tmp_path / "damaged").write_text("sha256:12\n")
        with pytest.raises(ConfigError, match=message):
            KeyFile(path).add(named_key("sk-one", "app", "today"))
    assert (tmp_path / "damaged").read_text() == "sha256:12\n"
