"""Images and files in all wire formats, sent to an engine that reads only text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.stack import BOTH, Stack

Json = dict[str, Any]
PNG = "iVBORw0KGgo="
DATA_URL = f"data:image/png;base64,{PNG}"
PDF = "data:application/pdf;base64,JVBERi0="


def chat(part: Json) -> Json:
    return {"model": "fake", "messages": [{"role": "user", "content": [part]}]}


def responses(part: Json) -> Json:
    return {"model": "fake", "input": [{"role": "user", "content": [part]}]}


def messages(block: Json) -> Json:
    return chat(block) | {"max_tokens": 8}


CASES: dict[str, tuple[str, Json]] = {
    "chat image": ("chat/completions", chat({"type": "image_url", "image_url": {"url": DATA_URL}})),
    "chat file": ("chat/completions", chat({"type": "file", "file": {"file_data": PDF}})),
    "responses image": (
        "responses",
        responses({"type": "input_image", "image_url": DATA_URL, "detail": "auto"}),
    ),
    "responses file": (
        "responses",
        responses({"type": "input_file", "filename": "a.pdf", "file_data": PDF}),
    ),
    "messages image": (
        "messages",
        messages(
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": PNG},
            }
        ),
    ),
    "messages file": (
        "messages",
        messages(
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            }
        ),
    ),
}


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_an_image_or_a_file_is_refused_instead_of_ignored(
    stack: Stack, siblings: str, case: str
) -> None:
    path, body = CASES[case]
    answer = httpx.post(f"{stack.proxy(siblings).url}/v1/{path}", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
