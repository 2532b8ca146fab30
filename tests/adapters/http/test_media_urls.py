"""Which media URLs of a request an engine may fetch."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from fakevllm_adapters.http.media_urls import is_host_name, media_refusal

ALLOWED = ("images.example.com",)
METADATA = "http://169.254.169.254/latest/meta-data"
ANY_JSON = dict[str, Any]


def refusal(body: ANY_JSON, allowed: tuple[str, ...] = ALLOWED) -> str | None:
    """Return the message of the refusal, or None if the request is accepted."""
    error = media_refusal(orjson.dumps(body), body, allowed)
    return None if error is None else str(error.body["error"]["message"])


def with_image(url: str) -> ANY_JSON:
    return _chat([{"type": "image_url", "image_url": {"url": url}}])


def _chat(content: object) -> ANY_JSON:
    return {"messages": [{"role": "user", "content": content}]}


def test_the_urls_of_nested_messages_are_found_without_recursion() -> None:
    raw = b'{"messages": %s{"image_url": "%s"}%s}' % (b"[" * 1000, METADATA.encode(), b"]" * 1000)
    assert media_refusal(raw, orjson.loads(raw), ALLOWED) is not None


@pytest.mark.parametrize(
    "body",
    [
        _chat(
            [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": METADATA}}]
        ),
        _chat([{"image_url": METADATA}]),
        _chat([{"image_url": {"url": METADATA}, "uuid": "1"}]),
        _chat([{"type": "video_url", "video_url": {"url": METADATA}}]),
        _chat([{"type": "audio_url", "audio_url": {"url": METADATA}}]),
        {"messages": [{"role": "user", "type": "tool_use", "content": [{"image_url": METADATA}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": METADATA}]}]},
        {"type": "tool_use", "input": [{"content": [{"image_url": METADATA}]}]},
        {"input": [{"type": "function_call_output", "output": [{"image_url": METADATA}]}]},
        {"input": [{"content": [{"type": "input_file", "file_url": METADATA}]}]},
        _chat([{"type": "image", "source": {"type": "url", "url": METADATA}}]),
        _chat(
            [
                {
                    "type": "tool_result",
                    "content": [{"type": "image", "source": {"type": "url", "url": METADATA}}],
                }
            ]
        ),
        {"system": [{"type": "image", "source": {"type": "url", "url": METADATA}}]},
    ],
)
def test_a_url_of_another_host_is_refused_in_every_format(body: ANY_JSON) -> None:
    assert "host '169.254.169.254' are not fetched" in (refusal(body) or "")


@pytest.mark.parametrize(
    "body",
    [
        with_image("https://images.example.com/cat.png"),
        with_image("HTTP://Images.Example.COM:8080/cat.png?size=1#top"),
        with_image("data:image/png;base64,AAAA"),
        with_image("DATA:image/png;base64,AAAA"),
        _chat("Look at http://169.254.169.254/"),
        _chat([{"type": "text", "text": "http://169.254.169.254/"}]),
        _chat([{"type": "tool_use", "input": {"url": METADATA, "image_url": METADATA}}]),
        _chat([{"type": "image_url", "image_url": None, "uuid": "1"}]),
        _chat([{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]),
        {"messages": None, "input": "http://169.254.169.254/"},
    ],
)
def test_allowed_hosts_data_urls_and_text_are_accepted(body: ANY_JSON) -> None:
    assert refusal(body) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com\\@169.254.169.254/",
        "http://images.example.com@169.254.169.254/",
        "http://169.254.169.254#@images.example.com/",
        "http://images.example.com:80@169.254.169.254/",
        "http://images.example.com .evil.org/",
        "http:///images.example.com/",
        "http:images.example.com",
        "//images.example.com/cat.png",
        " https://images.example.com/cat.png",
        "https://images.example.com/\ncat.png",
        "https://images.example.com.evil.org/",
        "https://evil-images.example.com/",
        "https://[::1]/",
        "file:///etc/passwd",
        "ftp://images.example.com/",
        "",
    ],
)
def test_a_url_that_parsers_could_read_differently_is_refused(url: str) -> None:
    assert "not fetched" in (refusal(with_image(url)) or "")


def test_without_allowed_hosts_only_data_urls_are_accepted() -> None:
    assert refusal(with_image("https://images.example.com/cat.png"), ()) is not None
    assert refusal(with_image("data:image/png;base64,AAAA"), ()) is None


def test_a_body_that_only_pythons_parser_reads_is_checked_too() -> None:
    raw = b'{"temperature": NaN, "messages": [{"content": [{"image_url": "http://10.0.0.1/"}]}]}'
    assert media_refusal(raw, None, ALLOWED) is not None
    assert media_refusal(b"no JSON", None, ALLOWED) is None
    assert media_refusal(b"[1]", None, ALLOWED) is None


@pytest.mark.parametrize("text", ["", "https://a.b", "a/b", "a b", "*", ".com", "A.com", "a:80"])
def test_a_media_domain_is_a_host_name(text: str) -> None:
    assert not is_host_name(text)
    assert is_host_name("images.example.com")
    assert is_host_name("10.0.0.1")
