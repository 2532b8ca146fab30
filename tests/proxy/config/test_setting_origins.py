"""The list of all settings: their origins, and their values without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakevllm.config.model import Config, load
from fakevllm.config.setting_origins import (
    NOT_SET,
    SET,
    Origin,
    Setting,
    SettingSources,
    settings_of,
    sources_of,
)

TOML = """
[proxy]
port = 9000

[swarm]
key = "sk-of-the-file"

[serve.routes.chat]
policy = "lead"

[hooks.reload]
groups = 7

[privacy]
redact = ["api_key"]

[job]
lr = 3e-5
num_repeat = 4
lora_rank = 8
lora_target_modules = ["q_proj"]

[server]
model = "demo"
key-file = "keys"
api_key = "sk-of-the-server"
trainer_arg = ["--hub-token=sk-of-the-hub"]
rollout_url = "http://user:sk-of-the-url@gpu:8000"
"""


def listed(file: Path | None, flags: dict[str, Any], **environment: str) -> dict[str, Setting]:
    settings = settings_of(load(file, flags), sources_of(file, flags, environment))
    assert len({setting.key for setting in settings}) == len(settings)
    return {setting.key: setting for setting in settings}


def test_each_setting_names_the_place_that_decided_its_value(tmp_path: Path) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(TOML)
    flags = {
        "proxy": {"port": 9001, "host": None},
        "swarm": {"key": "sk-of-the-environment"},
        "fallback": {"url": "http://127.0.0.1:1", "key": "sk-of-the-flag"},
    }
    settings = listed(
        file,
        flags,
        FAKEVLLM_SWARM_KEY="sk-of-the-environment",
        FAKEVLLM_FALLBACK_KEY="another",
    )
    origins = {
        "proxy.port": ("9001", Origin.COMMAND_LINE),
        "proxy.host": ('"127.0.0.1"', Origin.DEFAULT),
        "swarm.key": (SET, Origin.ENVIRONMENT),
        "fallback.key": (SET, Origin.COMMAND_LINE),
        "hooks.reload.groups": ("7", Origin.FILE),
        "hooks.reload.max_s": ("60.0", Origin.DEFAULT),
        "privacy.redact": ('["api_key"]', Origin.FILE),
        "job.lr": ("3e-05", Origin.FILE),
        "job.num_repeat": ("4", Origin.FILE),  # in the file, although it is the default
        "job.target_modules": ('"q_proj"', Origin.FILE),
        "job.batch_size": ("8", Origin.DEFAULT),
        "server.model": ('"demo"', Origin.FILE),
        "server.key-file": ('"keys"', Origin.FILE),
        "server.trainer_arg": (SET, Origin.FILE),
    }
    assert {key: (settings[key].value, settings[key].origin) for key in origins} == origins
    assert settings["serve.routes"].origin is Origin.FILE
    assert "lead" in settings["serve.routes"].value


def test_no_secret_is_in_the_list(tmp_path: Path) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(TOML)
    flags = {"fallback": {"url": "http://127.0.0.1:1", "key": "sk-of-the-flag"}}
    assert "sk-" not in str(listed(file, flags))


def test_only_keys_and_the_webhook_are_secret_and_all_settings_are_listed() -> None:
    settings = settings_of(Config(), SettingSources())
    hidden = {setting.key for setting in settings if setting.value in (SET, NOT_SET)}
    assert hidden == {"swarm.key", "fallback.key", "alerts.url"}
    assert {setting.origin for setting in settings} == {Origin.DEFAULT}
    sections = {setting.key.partition(".")[0] for setting in settings}
    assert sections == set(Config.model_fields) - {"server"}  # an empty table has no settings
