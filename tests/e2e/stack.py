"""One server and two proxies in front of it, with one sibling and with three."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

ALIAS = "gpt-4o"
HELLO = "[[say Hello, wörld.]]"
CHAT = "/v1/chat/completions"
JSON = "application/json"
VALID: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": HELLO}]}
BOTH = pytest.mark.parametrize("siblings", ["one", "three"])


@dataclass(frozen=True, slots=True)
class Stack:
    server: Process
    one: Process
    """The proxy with one sibling and one alias."""
    three: Process
    """The proxy with three siblings and a hook, which accepts any model name."""

    def proxy(self, name: str) -> Process:
        return self.one if name == "one" else self.three


@contextmanager
def running_stack(folder: Path) -> Generator[Stack]:
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    job = folder / "fakevllm.toml"
    job.write_text("[job]\nbatch_size = 2\nlr = 0.1\n")
    with Processes(folder) as started:
        server = started.server("--backend", "fake")
        shared = ["--config", str(job), "--hooks", str(hooks)]
        three = started.proxy(
            server, *shared, "--n", "3", "--alias", "*", folder="three", wait=False
        )
        one = started.proxy(server, *shared, "--n", "1", "--alias", ALIAS, folder="one", wait=False)
        yield Stack(server, one.wait_until_healthy(), three.wait_until_healthy())


def post(
    process: Process, body: str | bytes | dict[str, Any], content_type: str = JSON
) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"Content-Type": content_type}
    return httpx.post(f"{process.url}{CHAT}", content=content, headers=headers, timeout=20)
