"""Read the text of a message's content, for engines whose model takes only text.

A message with images, audio, videos or files is refused with vLLM's error message. This module does
no I/O.
"""

from __future__ import annotations

from typing import Any, cast

from fakevllm_adapters.protocol.errors import Json, bad_request

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""For each type of content part, the field that holds its text."""
_MEDIA_PARTS = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "file",
    }
)


def content_text(content: object, model_name: str) -> str:
    """Return the text of a message's content.

    The content is a string or a list of parts. As in vLLM, the texts of parts are joined with line
    breaks. Raises WireError (400) if a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("`content` must be a string or a list of parts.", "messages")
    return "\n".join(_part_text(part, model_name) for part in cast(list[Any], content))


def _part_text(part: object, model_name: str) -> str:
    if isinstance(part, str):
        return part
    fields = cast(Json, part) if isinstance(part, dict) else {}
    kind: object = fields.get("type")
    if isinstance(kind, str) and kind in _MEDIA_PARTS:
        raise bad_request(f"{model_name} is not a multimodal model")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise bad_request(f"Unknown part type: {str(kind)[:200]}")
    text = fields.get(_TEXT_PARTS[kind])
    return text if isinstance(text, str) else ""
