"""Read settings from the folder of vLLM's model: the chat template, the default sampling
parameters, and the number of layers.

There is no such folder if vLLM downloads the model from the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fakevllm_server.backends.vllm.response import Json, as_list, as_object, parse_object

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json that set vLLM's default sampling parameters. vLLM ignores the key
`do_sample`."""


def read_chat_template(model: str | None, flags: Mapping[str, str | None]) -> str | None:
    """Return the chat template that vLLM will use. Return None if the template cannot be read.
    `flags` are vLLM's command line flags."""
    user_template = flags.get("chat-template")
    if user_template is not None:
        return _read_text(Path(user_template)) or user_template
    if model is None:
        return None
    folder = Path(model)
    return _read_text(folder / "chat_template.jinja") or _template_in(
        _read_json(folder / "tokenizer_config.json")
    )


def read_default_sampling(model: str | None, flags: Mapping[str, str | None]) -> Json:
    """Return vLLM's default values for sampling parameters. vLLM uses a default if a request does
    not set the parameter. `flags` are vLLM's command line flags."""
    source = flags.get("generation-config") or "auto"
    folder = model if source == "auto" else source
    settings: Json = {}
    if folder is not None and folder != "vllm":
        settings = _read_json(Path(folder) / "generation_config.json")
    settings |= parse_object(flags.get("override-generation-config") or "{}")
    return {key: settings[key] for key in SAMPLING_KEYS if settings.get(key) is not None}


def read_num_layers(model: str | None) -> int | None:
    """Return the number of layers of the model's text part. Return None if the number cannot be
    read."""
    config = {} if model is None else _read_json(Path(model) / "config.json")
    for part in (as_object(config.get("text_config")), config):
        value = part.get("num_hidden_layers")
        if isinstance(value, int) and value > 0:
            return value
    return None


def _template_in(config: Json) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, str):
        return template
    # A list of named templates. All of them write tool calls in the same way.
    texts = [str(as_object(entry).get("template")) for entry in as_list(template)]
    return "\n".join(texts) or None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _read_json(path: Path) -> Json:
    return parse_object(_read_text(path) or "{}")
