"""A mistake in the configuration is one line with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from tests.proxy.config.test_model import write_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[proxy]\nlisten = 1\n", "Unknown key `proxy.listen`.*the known keys are host, port"),
        ("[servers]\n", "Unknown key `servers`.*write server.$"),
        ("[web]\n", "Unknown key `web`.*the known keys are proxy, console, swarm"),
        ("[porxy]\n", "Unknown key `porxy`.*take it out, or write proxy.$"),
        ("[job]\nnum_repeats = 4\n", "Unknown key `job.num_repeats`.*: .*write num_repeat.$"),
        ("lr = 1\n", r"Unknown key `lr` in .*toml: it belongs below \[job\]\.$"),
        ("key = 'a'\n", r"it belongs below \[swarm\] or \[fallback\]\.$"),
        ("[proxy]\nport = 'x'\n", r"`proxy.port` in .*valid integer.*got 'x'"),
        ("[job]\ntemperature = 0\n", "`job.temperature`.*greater than 0"),
        ("proxy\n", "is not TOML"),
        ("[serve]\npolicy = lead\n", r"is not TOML: Invalid value .*: put text in quotes"),
        ("[job]\nexperiment = 'b'\n", "Unknown key `job.experiment`.*, or write experiment_name.$"),
        ("[job]\nlearning_rate = 1e-4\n", "Unknown key `job.learning_rate`.*, or write lr.$"),
        ("[policy.skip]\nroute = 'chat'\n", r"`policy.skip` in .*: write \[\[policy.skip\]\]"),
        ("proxy = 5\n", r"`proxy` in .* is a section: write \[proxy\]"),
        ("[[job]]\nlr = 1\n", r"`job` in .* is a section: write \[job\]"),
        ("[guard]\nentropy = 'warn'\n", "Unknown key `guard.entropy`.*entropy_collapse"),
        ("[guard]\nrefusals = 'stop'\n", "`guard.refusals` in .*'off', 'warn', 'hold' or"),
        ("[guard.thresholds]\nrefusals = 2\n", "`guard.thresholds.refusals` in .*equal to 1"),
        ("[guard]\nrefusals = 'rollback'\n", 'set release.mode to "gated", or guard.refusals to'),
        ("[guard]\nsecond_judge = 'hold'\n", "needs the scores .* in second_judge_annotation"),
        (
            "[alerts]\nurl = 'hooks/SECRET'\n",
            r"`alerts.url` in .*: write it as http://HOST:PORT\.$",
        ),
        ("[swarm]\nurl = 'localhost:1'\n", "`swarm.url` in .*: write it as http://HOST:PORT"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_key_and_the_fix(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_config(tmp_path, text), {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"job": {"num_repeat": 0}}, r"^`--n` \(`job.num_repeat`\): .*\(got 0\)\.$"),
        ({"proxy": {"port": 70000}}, r"^`--port` \(`proxy.port`\): .*\(got 70000\)\.$"),
        ({"swarm": {"url": "http://a:sk-b@x:1"}}, "HOST:PORT, and the key by its own flag"),
        ({"swarm": {"url": "x:1"}}, r"^`--swarm` \(`swarm.url`\): write it as http://HOST:PORT"),
        ({"models": {"aliases": [5]}}, r"^`--alias` \(`models.aliases.0`\): "),
    ],
)
def test_a_wrong_flag_is_reported_by_its_flag_name(
    tmp_path: Path, flags: dict[str, dict[str, object]], message: str
) -> None:
    for file in (None, write_config(tmp_path, "[job]\nlr = 1e-4\n")):
        with pytest.raises(ConfigError, match=message):
            load(file, flags)


def test_a_wrong_value_in_the_file_is_not_reported_as_a_flag(tmp_path: Path) -> None:
    file = write_config(tmp_path, "[job]\nnum_repeat = 0\n")
    with pytest.raises(ConfigError, match=r"^`job.num_repeat` in .*fakevllm.toml: "):
        load(file, {"job": {"num_repeat": None}, "proxy": {"port": 1}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau_pos = 0.5", "tau_pos = 0.5 would change nothing, it is for loss = sapo: take it out"),
        ("lora_alpha = 8", "lora_alpha = 8 would change nothing, it is for lora_rank above 0"),
        ("overlong_buffer_len = 8", "overlong_.* set max_response_length too, .*"),
        ('rollout_rs = "token_k9"\nrollout_rs_threshold = 1', "rollout_rs must be one of .*_k9"),
    ],
)
def test_job_settings_that_the_server_would_refuse_are_refused_by_the_proxy(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^`job` in .*fakevllm\.toml: {message}[^{{]*\.$"):
        load(write_config(tmp_path, f"[job]\nlr = 1e-4\n{text}\n"), {})


@pytest.mark.parametrize(
    "text",
    [
        '[serve]\npolicy = "lead"\nquorum = 3\n',
        "[serve.routes.chats]\nquorum = 3\n",
        "[serve.routes.chat]\nquorom = 3\n",
        "[policy]\nn = {chat = 500}\n",
        '[policy]\nskip = [{name = "a"}]\n',
        '[fallback]\nmodel = "a"\n',
        "[job]\nmodel = {a = 1}\n",
        "[job]\ntau_pos = 0.5\n",
    ],
)
def test_messages_do_not_print_tables(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(write_config(tmp_path, text), {})
    assert "{" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[release]\nbaseline_share = 1.0", "baseline_share = 1 leaves no session for the other"),
        ("[release]\nbaseline_share = 1.5", "shares must add up to less than 1"),
        ("[release]\nbaseline_share = -0.1", "greater than or equal to 0"),
        ("[release]\nbaseline_version = -1", "greater than or equal to 0"),
        ("[release]\nreward_range = [1, 0]", "the smaller number first"),
        ("[release]\nreward_range = [0]", "reward_range"),
        (
            "[release]\nbaseline_share = 0.1\n[job]\nlockstep = true",
            "release.baseline_share does not go with job.lockstep",
        ),
    ],
)
def test_a_mistake_in_the_baseline_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(write_config(tmp_path, text), {})
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
