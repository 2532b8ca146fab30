from pathlib import Path

import pytest

from fakevllm.config import load
from fakevllm.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "fakevllm.toml"
    file.write_text(text)
    return file


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "[proxy]\nport = 9000\n[job]\nnum_repeat = 3\nlr = 1e-4\n")
    config = load(file, {"job": {"num_repeat": 6}, "proxy": {"host": None}})
    assert (config.proxy.port, config.job.num_repeat, config.job.lr) == (9000, 6, 1e-4)
    assert config.proxy.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[proxy]\nprot = 1\n", "Unknown key `proxy.prot`.*known here are host, port"),
        ("[porxy]\n", "Unknown key `porxy`.*known here are proxy, swarm"),
        ("[job]\nbatch = 1\n", "Unknown key `job.batch`.*batch_size"),
        ("[proxy]\nport = 'x'\n", r"`proxy.port` in .*valid integer.*got 'x'"),
        ("[job]\ntemperature = 0\n", "`job.temperature`.*greater than 0"),
        ("proxy\n", "is not TOML"),
        ("proxy = 5\n", r"`proxy` in .* is a section: write \[proxy\]"),
        ("[[job]]\nlr = 1\n", r"`job` in .* is a section: write \[job\]"),
        ("[swarm]\nurl = 'localhost:1'\n", "`swarm.url` in .*: write it as http://HOST:PORT"),
    ],
)
def test_a_bad_key_is_named_with_what_would_be_right(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, text), {})


def test_listening_to_the_world_needs_a_key_file(tmp_path: Path) -> None:
    config = load(None, {"proxy": {"host": "0.0.0.0"}})
    with pytest.raises(ConfigError, match="--key-file"):
        config.keys()
    keys = tmp_path / "keys"
    keys.write_text("# app one\nsk-one\n")
    ring = load(None, {"proxy": {"host": "0.0.0.0", "key_file": keys}}).keys()
    assert ring.accepts("sk-one") and not ring.accepts("sk-two") and not ring.accepts(None)


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load(None, {"proxy": {"key_file": keys}}).keys()


def test_a_flag_for_a_section_that_is_none_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`proxy` in .* is a section"):
        load(written(tmp_path, "proxy = 5\n"), {"proxy": {"port": 1}})


@pytest.mark.parametrize(
    "url", ["localhost:10086", "ftp://host", "http://", "http://[::1", "http://host:99999", ""]
)
def test_a_swarm_address_that_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT"):
        load(None, {"swarm": {"url": url}})


def test_files_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_bytes("[proxy]\nhost = 'ä'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="toml is not UTF-8"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"key file .* is not UTF-8"):
        load(None, {"proxy": {"key_file": file}}).keys()
