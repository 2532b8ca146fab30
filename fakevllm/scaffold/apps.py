"""The apps for which `fakevllm init` writes a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

AppName = Literal[
    "openai",
    "webchat",
    "opencode",
    "codex",
    "claude-code",
    "qwen-code",
    "aider",
    "open-webui",
    "langchain",
]

ANY_NAME = "*"
"""Alias with which the proxy accepts every model name."""
APP_MODEL = "app-model"
"""Model name in all configurations of `adapters/apps`."""

ALIASES: dict[AppName, str] = {
    "openai": ANY_NAME,
    "webchat": ANY_NAME,
    "opencode": APP_MODEL,
    "codex": APP_MODEL,
    "claude-code": APP_MODEL,
    "qwen-code": APP_MODEL,
    "aider": APP_MODEL,
    "open-webui": ANY_NAME,
    "langchain": APP_MODEL,
}
"""Alias that the proxy accepts from each app. Open WebUI asks the proxy for the names of its
models."""

_IN_WHEEL = Path(__file__).parent / "app_configurations"
_IN_CLONE = Path(__file__).parents[2] / "adapters" / "apps"


def configurations_folder() -> Path:
    """Return the folder with one folder of configuration files per app. The build copies
    `adapters/apps` into the wheel; in a clone, the folder itself is used."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
