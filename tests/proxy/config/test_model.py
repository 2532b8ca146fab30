"""The configuration: its sources, its checks, and its derived values."""

from pathlib import Path
from typing import Any

import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.keys import named_key


def write_config(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "fakevllm.toml"
    file.write_text(text)
    return file


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = write_config(tmp_path, "[proxy]\nport = 9000\n[job]\nnum_repeat = 3\nlr = 1e-4\n")
    config = load(file, {"job": {"num_repeat": 6}, "proxy": {"host": None}})
    assert (config.proxy.port, config.job.num_repeat, config.job.lr) == (9000, 6, 1e-4)
    assert config.proxy.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9001"),
        ("0.0.0.0", "http://127.0.0.1:9001"),
        ("::", "http://[::1]:9001"),
        ("fd00::1", "http://[fd00::1]:9001"),
        ("gpu.example", "http://gpu.example:9001"),
    ],
)
def test_the_local_url_is_the_address_the_proxy_listens_on(
    tmp_path: Path, host: str, url: str
) -> None:
    file = write_config(tmp_path, f'[proxy]\nhost = "{host}"\nport = 9001')
    assert load(file, {}).local_url == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0", "0", "", "gpu-box"])
def test_listening_on_a_public_address_needs_a_key(tmp_path: Path, host: str) -> None:
    flags = {"host": host, "run_dir": tmp_path}
    with pytest.raises(ConfigError, match=r"reachable from outside.*keys add.*--key-file"):
        load(None, {"proxy": flags}).keys()
    keys = tmp_path / "some_keys"
    keys.write_text("# app one\nsk-one\n")
    ring = load(None, {"proxy": flags | {"key_file": keys}}).keys()
    assert ring.accepts("sk-one") and not ring.accepts("sk-two") and not ring.accepts(None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.evil.example", "192.168.0.1"])
def test_a_public_address_is_refused_if_all_keys_are_revoked(tmp_path: Path, host: str) -> None:
    file = KeyFile(tmp_path / "keys")
    file.add(named_key("sk-one", "app", "today"))
    config = load(None, {"proxy": {"host": host, "run_dir": tmp_path}})
    assert config.keys().accepts("sk-one")
    file.revoke("app", "later")
    with pytest.raises(ConfigError, match=r"has no valid key: .*keys add"):
        config.keys()


@pytest.mark.parametrize(
    "text", ["", "\n# nothing\n", f"sha256:{'0' * 64} app today revoked later"]
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_key_file_without_a_valid_key_is_refused_on_loopback_too(
    tmp_path: Path, text: str, is_named: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    flags = {"key_file": keys} if is_named else {"run_dir": tmp_path}
    with pytest.raises(ConfigError, match="has no valid key"):
        load(None, {"proxy": flags}).keys()


def test_a_configured_key_file_must_exist_and_be_readable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist: make one with .*keys add"):
        load(None, {"proxy": {"key_file": tmp_path / "nowhere"}}).keys()
    with pytest.raises(ConfigError, match=r"cannot be used \(Is a directory\)"):
        load(None, {"proxy": {"key_file": tmp_path}}).keys()
    (tmp_path / "keys").write_text("sk-1\nsha256:12\n")
    with pytest.raises(ConfigError, match="line 2 is not"):
        load(None, {"proxy": {"run_dir": tmp_path}}).keys()


def test_keys_added_in_the_run_directory_are_valid_a_second_later(tmp_path: Path) -> None:
    now = 0.0
    ring = load(None, {"proxy": {"run_dir": tmp_path / "run"}}).keys(lambda: now)
    assert not ring and ring.accepts(None)
    file = KeyFile(tmp_path / "run" / "keys")
    file.add(named_key("sk-one", "app", "today"))
    now += 1
    assert ring.accepts("sk-one") and not ring.accepts(None)
    file.revoke("app", "later")
    file.add(named_key("sk-two", "app", "later"))
    now += 1
    assert ring.accepts("sk-two") and not ring.accepts("sk-one")


def test_an_unreadable_change_of_the_key_file_is_logged_without_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    now = 0.0
    ring = load(None, {"proxy": {"key_file": keys}}).keys(lambda: now)
    keys.write_text("sk-one\nsha256:sk-secret\n")
    now += 1
    assert ring.accepts("sk-one")
    (record,) = caplog.records
    assert "keeps its previous keys: line 2 is not" in record.getMessage()
    assert "sk-" not in record.getMessage()


def test_wrong_limits_are_refused_by_name(tmp_path: Path) -> None:
    file = write_config(tmp_path, "[limits]\nnum_stop = 4\nallowed_fields = ['vllm_xargs']\n")
    limits = load(file, {}).limits
    assert limits.per_request == Limits(num_stop=4)
    assert limits.allowed_fields == ("vllm_xargs",)
    assert load(None, {}).limits.per_request == Limits()
    for text, message in (
        ("files = 4", "Unknown key `limits.files`.*the known keys are body_bytes"),
        ("json_depth = 500", "`limits.json_depth`.*less than or equal to 200"),
        ("num_open = -1", "`limits.num_open`.*greater than or equal to 0"),
        ("allowed_fields = ['model']", "model is never removed from bodies: .*kv_transfer_params"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(write_config(tmp_path, f"[limits]\n{text}\n"), {})


def test_no_message_shows_a_key_or_a_password_in_an_address(tmp_path: Path) -> None:
    for text in ("url = 'http://me:sesame@host:1'", "url = 'me:sesame@host'", "key = ['sesame']"):
        with pytest.raises(ConfigError) as refusal:
            load(write_config(tmp_path, f"[swarm]\n{text}\n"), {})
        assert "`swarm." in str(refusal.value) and "sesame" not in str(refusal.value)
    assert "sesame" not in repr(load(None, {"swarm": {"key": "sesame"}}))


def test_a_value_in_place_of_a_section_is_refused_if_a_flag_sets_a_key_too(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"`proxy` in .* is a section"):
        load(write_config(tmp_path, "proxy = 5\n"), {"proxy": {"port": 1}})


@pytest.mark.parametrize(
    "url",
    [
        "localhost:10086",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:99999",
        "http://me:key@host:1",
        "http://127.0.0.1:10086/v1",
        "",
    ],
)
def test_a_swarm_address_that_is_not_an_http_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT"):
        load(None, {"swarm": {"url": url}})


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("port = 18086", "http://127.0.0.1:18086"),
        ('host = "0.0.0.0"', "http://127.0.0.1:10086"),
        ('host = "::1"\nport = 18086', "http://[::1]:18086"),
        ("port = 0", "http://127.0.0.1:10086"),
        ('port = "x"', "http://127.0.0.1:10086"),
        ("port = true", "http://127.0.0.1:10086"),
        ('host = ""', "http://127.0.0.1:10086"),
        ('port = 18086\n[swarm]\nurl = "http://gpu-box:10086"', "http://gpu-box:10086"),
    ],
)
def test_the_swarm_server_is_by_default_the_one_of_the_same_file(
    tmp_path: Path, server: str, url: str
) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(f"[server]\n{server}\n")
    assert load(file, {}).swarm.url == url
    flag = {"swarm": {"url": "http://other:1"}}
    assert load(file, flag).swarm.url == "http://other:1"


@pytest.mark.parametrize(
    ("host", "server_host"), [("127.0.0.1", "localhost"), ("0.0.0.0", "127.0.0.1"), ("box", "box")]
)
def test_the_proxys_own_address_is_refused_as_the_swarm_server(
    tmp_path: Path, host: str, server_host: str
) -> None:
    (tmp_path / "keys").write_text("sk-one\n")
    own = {"host": host, "port": 8000, "key_file": tmp_path / "keys"}
    with pytest.raises(ConfigError, match="the address of this proxy itself"):
        load(None, {"proxy": own, "swarm": {"url": f"http://{server_host}:8000"}})
    load(None, {"proxy": own, "swarm": {"url": f"http://{server_host}:10086"}})


def test_files_that_are_not_utf_8_are_reported_by_name(tmp_path: Path) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_bytes("[proxy]\nhost = 'ä'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="toml is not UTF-8"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"key file .* is not UTF-8"):
        load(None, {"proxy": {"key_file": file}}).keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sample_fraction = 50", "`policy.sample_fraction`.*less than or equal to 1.*got 50"),
        ("sample_fraction = nan", "`policy.sample_fraction`.*finite number"),
        ("shadow = 'maybe'", "`policy.shadow`.*write true or false.*got 'maybe'"),
        ("n = 5", "`policy.n`.*write a table"),
        ("n = {chat = 0}", "`policy.n`.*'chat' must have 1 to 256 siblings, got 0"),
        ("side_markers = 'Name it'", "`policy.side_markers`.*write a list"),
        ("side_markers = ['']", "`policy.side_markers.0`.*match every request"),
        ("side_headers = [': x']", "`policy.side_headers.0`.*'X-Name: value'"),
        ("side_rules = ['words']", "`policy.side_rules.0`.*'no_tools', 'marker' or 'quoted'"),
        ("skip = [{}]", "`policy.skip.0`.*every request: name one of route, model, header"),
        ("skip = [{name = 'a'}]", "`policy.skip.0`.*every request: name one of"),
        ("skip = ['a']", r"`policy.skip.0` in .* is a section: write \[\[policy.skip\]\]"),
        ("skip = [{rout = 'a'}]", "Unknown key `policy.skip.0.rout`.*write route.$"),
        ("skip = [{route = 'a'}]", "is not a route: write one of chat, completions.*got 'a'"),
        ("skip = [{first_message = '('}]", "is not a regular expression.*write one, such as"),
        ("skip = [{prompt_chars = -1}]", "`policy.skip.0.prompt_chars`.*greater than or equal"),
        ("sampled = 1", "Unknown key `policy.sampled`.*the known keys are sample_fraction"),
    ],
)
def test_a_wrong_policy_is_reported_in_one_line_with_the_fix(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load(write_config(tmp_path, f"[policy]\n{text}\n"), {})
    assert "\n" not in str(refusal.value)


def test_a_fallback_needs_a_url_and_no_message_shows_its_key(tmp_path: Path) -> None:
    for text, message in (
        ("[fallback]\nmodel = 'm'", "`fallback` in .*write its url too"),
        ("[fallback]\nurl = 'gpt'", "`fallback.url`.*write it as http://HOST:PORT"),
        ("[fallback]\nurl = 'http://a'\nkey = ['sesame']", "`fallback.key`.*valid string"),
        ("[upstream]\nhold_s = -1", "`upstream.hold_s`.*greater than or equal to 0"),
    ):
        with pytest.raises(ConfigError, match=message) as refusal:
            load(write_config(tmp_path, text), {})
        assert "sesame" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"^`--fallback` \(`fallback.url`\): write it as"):
        load(None, {"fallback": {"url": "gpt"}})
    assert "sesame" not in repr(load(None, {"fallback": {"key": "sesame"}}))


REMAX = '[job]\nalgorithm = "remax"\n'
WITH_HOOKS: dict[str, dict[str, Any]] = {"hooks": {"path": Path("hooks")}}


@pytest.mark.parametrize(
    "text",
    ["", '[serve]\npolicy = "lead"\n', '[serve]\npolicy = "greedy"\n[policy]\nshadow = true\n'],
)
def test_remax_without_a_greedy_answer_is_refused_in_one_line_with_the_fix(
    tmp_path: Path, text: str
) -> None:
    message = r'fakevllm\.toml: job\.algorithm "remax" .* set `policy = "greedy"` in \[serve\].*\.$'
    with pytest.raises(ConfigError, match=message) as error:
        load(write_config(tmp_path, REMAX + text), WITH_HOOKS | {"swarm": {"key": "sesame"}})
    assert "sesame" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    ['[serve]\npolicy = "greedy"\n', '[serve.routes.completions]\npolicy = "greedy"\n'],
)
def test_remax_is_accepted_if_any_route_serves_a_greedy_answer(tmp_path: Path, text: str) -> None:
    assert load(write_config(tmp_path, REMAX + text), WITH_HOOKS).serves_greedy


def test_remax_is_accepted_without_hooks_for_active_clients(tmp_path: Path) -> None:
    assert not load(write_config(tmp_path, REMAX), {}).serves_greedy


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("[job]\nnum_repeat = 3\n", 3),
        ('[job]\nnum_repeat = 3\n[serve]\npolicy = "greedy"\n', 4),
        ('[job]\nnum_repeat = 3\n[serve.routes.chat]\npolicy = "greedy"\n', 4),
        ('[job]\nnum_repeat = 256\n[serve]\npolicy = "greedy"\n', 256),
        ("[job]\nnum_repeat = 3\n[policy]\nn = {chat = 5}\n", 5),
    ],
)
def test_the_maximum_number_of_siblings_includes_a_greedy_lead(
    tmp_path: Path, text: str, num: int
) -> None:
    file = write_config(tmp_path, text)
    assert load(file, WITH_HOOKS).max_siblings == num
    assert load(file, {}).max_siblings == 1


@pytest.mark.parametrize("origin", ["*", "null"])
def test_an_origin_of_any_page_is_allowed_only_with_a_key_file(tmp_path: Path, origin: str) -> None:
    flags: dict[str, Any] = {"run_dir": tmp_path, "allowed_origins": [origin]}
    config = load(None, {"proxy": flags})
    with pytest.raises(ConfigError, match=r"lets every web page use the model.*fakevllm keys add"):
        config.keys()
    (tmp_path / "keys").write_text("sk-one\n")
    assert config.keys().accepts("sk-one")


@pytest.mark.parametrize(
    "origin",
    [
        "localhost:3000",
        "http://localhost/",
        "http://LOCALHOST",
        "https://*.example",
        "",
        "http://a b",
    ],
)
def test_an_allowed_origin_must_be_written_as_browsers_send_it(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy.allowed_origins.* is not an origin: write it as"):
        load(None, {"proxy": {"allowed_origins": [origin]}})
    with pytest.raises(ConfigError, match="leave the default port out"):
        load(None, {"proxy": {"allowed_origins": ["https://chat.example:443"]}})


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "app://obsidian.md",
        "chrome-extension://abcdef",
        "http://[::1]:8080",
    ],
)
def test_origins_of_pages_extensions_and_desktop_apps_may_be_allowed(origin: str) -> None:
    assert load(None, {"proxy": {"allowed_origins": [origin]}}).proxy.allowed_origins == (origin,)


@pytest.mark.parametrize("name", ["gpu-box:8010", "http://gpu-box", "[::1]", "gpu box", "*", ""])
@pytest.mark.parametrize("section", ["proxy", "console"])
def test_an_allowed_host_is_a_name_without_a_port(section: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}.allowed_hosts.* is not a host name"):
        load(None, {section: {"allowed_hosts": [name]}})
    names = ("gpu-box", "a.example", "10.0.0.1", "::1")
    loaded = load(None, {section: {"allowed_hosts": names}})
    assert getattr(loaded, section).allowed_hosts == names


def test_allowed_hosts_in_upper_case_match_the_names_that_browsers_send() -> None:
    settings = {"proxy": {"host": "GPU-Box", "allowed_hosts": ["A.Example"]}}
    assert {"gpu-box", "a.example"} < load(None, settings).hosts


GATED = '[release]\nmode = "gated"\neval_dataset = "held_out.jsonl"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[release]\nmode = "gated"', r"held-out rows: name their file in eval_dataset"),
        (GATED + "baseline_share = 0.8", r"canary_share = 0.2 \+ baseline_share = 0.8 leaves no"),
        (GATED + "canary_share = 1.0", r"leaves no session for the other arms"),
        (GATED + "canary_share = 0", r"greater than 0"),
        (GATED + "margin = 1.0", r"margin 1 is as large as all of reward_range, from 0 to 1"),
        (GATED + "max_samples = 3", r"less than the 4 samples of one row"),
        (GATED + "alpha = 0.5", r"less than 0.5"),
        (GATED + "evaluate_every = 0", r"greater than or equal to 1"),
        (GATED + "[job]\nlockstep = true", r'release.mode "gated" does not go with job.lockstep'),
        (
            '[hooks]\npath = "hooks"\nwatch = true\n[job]\nlockstep = true',
            r"hooks.watch \(--watch-hooks\) does not go with job.lockstep",
        ),
        ('[release]\nmode = "canary"', r"'continuous' or 'gated'"),
    ],
)
def test_a_mistake_about_releases_is_one_line_that_names_the_fix(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        load(write_config(tmp_path, text), {})
    assert "\n" not in str(error.value)


def test_the_keys_of_the_gate_have_no_effect_on_the_shares_of_the_continuous_mode(
    tmp_path: Path,
) -> None:
    config = load(write_config(tmp_path, "[release]\nbaseline_share = 0.9"), {})
    assert config.release.shares == {"baseline_share": 0.9}
    assert not config.release.is_gated
