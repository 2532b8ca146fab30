"""Which URLs of a vLLM are accepted, and that a refusal does not repeat the URL's secrets."""

from __future__ import annotations

import pytest

from fakevllm_server.backends.vllm.remote_url import base_url, host_and_port
from fakevllm_server.types.backend import BackendRefused


@pytest.mark.parametrize(
    ("url", "base", "peer"),
    [
        ("http://gpu-box:8000", "http://gpu-box:8000", "gpu-box:8000"),
        ("http://gpu-box:8000/", "http://gpu-box:8000", "gpu-box:8000"),
        ("https://gpu-box/v1", "https://gpu-box", "gpu-box"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_a_url_may_end_in_a_slash_or_v1(url: str, base: str, peer: str) -> None:
    assert (base_url(url), host_and_port(url)) == (base, peer)


@pytest.mark.parametrize(
    "url",
    [
        "secret",
        "localhost:8000/secret",
        "ftp://secret:8000",
        "http://",
        "http://secret:port",
        "http://secret:99999",
        "http://secret:0",
        "http://secret:",
        "http://[secret",
        "http://a secret:8000",
        "http://secret@host:8000",
        "http://user:secret@host:8000",
        "http://user:secret@host:port",
        "http://host:8000/secret",
        "http://host:8000/v1?key=secret",
        "http://host:8000/v1#secret",
    ],
)
def test_an_invalid_url_is_refused_on_one_line_that_repeats_no_part_of_it(url: str) -> None:
    with pytest.raises(BackendRefused, match="--rollout-url http://HOST:PORT") as refused:
        base_url(url)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)
