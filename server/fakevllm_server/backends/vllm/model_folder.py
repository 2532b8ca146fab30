"""What the server reads from vLLM's model folder: the chat template and the default sampling. A
model that vLLM takes from the hub tells neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fakevllm_server.backends.vllm.answer import Json, as_list, as_object, object_in

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What vLLM takes from generation_config.json where a request is silent, whatever `do_sample`
says."""


def chat_template(model: str | None, flags: Mapping[str, str | None]) -> str | None:
    """The template vLLM will use, where it can be read."""
    own = flags.get("chat-template")
    if own is not None:
        return _text(Path(own)) or own
    if model is None:
        return None
    folder = Path(model)
    return _text(folder / "chat_template.jinja") or _template_in(
        _json(folder / "tokenizer_config.json")
    )


def default_sampling(model: str | None, flags: Mapping[str, str | None]) -> Json:
    """What vLLM samples with where a request is silent."""
    source = flags.get("generation-config") or "auto"
    folder = model if source == "auto" else source
    found: Json = {}
    if folder is not None and folder != "vllm":
        found = _json(Path(folder) / "generation_config.json")
    found |= object_in(flags.get("override-generation-config") or "{}")
    return {key: found[key] for key in SAMPLING_KEYS if found.get(key) is not None}


def _template_in(config: Json) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, str):
        return template
    # Several by name: tool calls look alike in all of them.
    texts = [str(as_object(entry).get("template")) for entry in as_list(template)]
    return "\n".join(texts) or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _json(path: Path) -> Json:
    return object_in(_text(path) or "{}")
