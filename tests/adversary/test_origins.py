"""Requests of browsers and desktop apps to a real proxy: preflights, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Processes

pytestmark = pytest.mark.slow

OBSIDIAN = "app://obsidian.md"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def test_only_allowed_origins_can_chat_and_read_the_stream(processes: Processes) -> None:
    file = processes.folder / "fakevllm.toml"
    file.write_text(f'[proxy]\nallowed_origins = ["{OBSIDIAN}"]\n')
    proxy = processes.proxy(processes.server("--backend", "fake"), "--config", str(file))
    url = f"{proxy.url}/v1/chat/completions"
    asked = {"Origin": OBSIDIAN, "Access-Control-Request-Method": "POST"}
    assert httpx.options(url, headers=asked).headers["access-control-allow-origin"] == OBSIDIAN
    for body in (BODY, BODY | {"stream": True}):
        reply = httpx.post(url, json=body, headers={"Origin": OBSIDIAN}, timeout=30)
        assert reply.status_code == 200 and reply.content
        assert reply.headers.get_list("access-control-allow-origin") == [OBSIDIAN]
    for origin in ("https://evil.example", "app://evil", "null", "x" * 5000):
        reply = httpx.post(url, json=BODY, headers={"Origin": origin}, timeout=30)
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
    lines = [line for line in proxy.log.splitlines() if "proxy.allowed_origins" in line]
    assert len(lines) == 1 and "https://evil.example" in lines[0]
