"""What `fakevllm up` reads from fakevllm.toml. The server itself checks the table [server]."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakevllm.errors import UserError
from fakevllm.up.settings import read_settings
from fakevllm_runtime.engines import boot_timeout_s

FAKE = '[server]\nbackend = "fake"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "fakevllm.toml"
    file.write_text(text)
    return file


def test_the_server_says_where_it_listens_and_what_it_starts(tmp_path: Path) -> None:
    file = written(tmp_path, f'{FAKE}port = 18086\nhost = "::1"\n')
    settings = read_settings(file, None)
    assert (settings.server.host, settings.server.port) == ("::1", 18086)
    assert settings.server.engines == ("fake",)
    assert settings.server.ready_timeout_s > boot_timeout_s(["fake"])


def test_server_and_proxy_share_the_run_directory_unless_the_server_has_its_own(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    shared = read_settings(written(tmp_path, FAKE), folder)
    assert shared.run_dir == folder
    assert shared.server_flags[-2:] == ["--run-dir", str(folder)] == shared.proxy_flags[-2:]
    of_file = read_settings(written(tmp_path, f'{FAKE}[proxy]\nrun_dir = "{folder}"\n'), None)
    assert of_file.server_flags == shared.server_flags and "--run-dir" not in of_file.proxy_flags
    for key in ("run-dir", "run_dir"):
        own = read_settings(written(tmp_path, f'{FAKE}{key} = "other"\n'), folder)
        assert "--run-dir" not in own.server_flags and own.proxy_flags[-1] == str(folder)


@pytest.mark.parametrize("url", ["http://127.0.0.1:10086", "http://localhost:10086"])
def test_the_address_of_the_server_may_be_written_twice(tmp_path: Path, url: str) -> None:
    read_settings(written(tmp_path, f'{FAKE}[swarm]\nurl = "{url}"\n'), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[proxy]\nport = 18000\n", r"has no table \[server\]: add one"),
        (f"{FAKE}prot = 1\n", r"Unknown key `prot` in \[server\] of .*fakevllm.toml: write port"),
        (f'{FAKE}port = "x"\n', "`port` in .* must be a whole number"),
        ('[server]\nbackend = "magic"\n', "--backend must be one of fake"),
        (f'{FAKE}log_format = "xml"\n', "'xml' is not one of"),
        (f'{FAKE}host = "0.0.0.0"\n', "reachable from outside: add --key-file"),
        (f"{FAKE}config = 1\n", "Unknown key `config`"),
        (f"{FAKE}port = 18086\n[proxy]\nport = 18086\n", "or change one of the ports"),
        (f"{FAKE}port = 18086\n[console]\nport = 18086\n", "are both 18086: change one"),
        (f'{FAKE}[console]\nhost = "0.0.0.0"\n', "set `console.key_file` to a file with a key"),
        (f"{FAKE}[proxy]\nprot = 1\n", "Unknown key `proxy.prot`"),
        (f'{FAKE}[proxy]\nhost = "0.0.0.0"\n', "fakevllm keys add NAME"),
        (f'{FAKE}[swarm]\nurl = "http://127.0.0.1:1"\n', "not the address of .* leave it out"),
        (f'{FAKE}[swarm]\nurl = "http://a.example:10086"\n', "not the address of"),
        (f'{FAKE}key-file = "keys"\n', "has no key for the server: set .* FAKEVLLM_SWARM_KEY"),
        (f'{FAKE}key_file = "keys"\n', "has no key for the server"),
        (f"{FAKE}[job]\nlockstep = true\n", "job.lockstep needs the embedded engine"),
        (
            '[server]\nmodel = "demo"\nreplicas = 2\n[job]\nlockstep = true\n',
            "job.lockstep needs one engine, and this server has 2 replicas",
        ),
        ("server = 3\n", "`server` in .*: write a table"),
        ("[server\n", "is not TOML"),
    ],
)
def test_a_mistake_is_one_line_with_its_fix(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAKEVLLM_SWARM_KEY", raising=False)
    with pytest.raises(UserError) as refusal:
        read_settings(written(tmp_path, text), None)
    assert re.search(message, str(refusal.value)) and "\n" not in str(refusal.value)


def test_a_file_that_the_server_would_read_as_yaml_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, FAKE).rename(tmp_path / "settings.conf")
    with pytest.raises(UserError, match=r"settings\.conf does not end in \.toml: rename it"):
        read_settings(file, None)


def test_a_server_with_keys_starts_if_the_proxy_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1234567890abcdef\n")
    table = f'{FAKE}key-file = "{keys}"\n'
    monkeypatch.setenv("FAKEVLLM_SWARM_KEY", "sk-1234567890abcdef")
    read_settings(written(tmp_path, table), None)
    monkeypatch.delenv("FAKEVLLM_SWARM_KEY")
    read_settings(written(tmp_path, f'{table}[swarm]\nkey = "sk-1234567890abcdef"\n'), None)


def test_a_python_without_the_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fakevllm_server is not installed in this Python"):
        read_settings(written(tmp_path, FAKE), None, is_installed=lambda module: False)


def test_a_folder_without_a_configuration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"There is no fakevllm\.toml in this folder: write one"):
        read_settings(None, None)
