"""A test of an engine that dies during an answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.demo_parts.process_kills import child_pids
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Processes

SLOW = [{"role": "user", "content": "[[say abcdefghij]] [[slow 0.3]]"}]


@pytest.mark.skipif(sys.platform != "linux", reason="engines are found in Linux's /proc")
def test_a_stream_whose_engine_dies_is_requested_again_without_an_error_for_the_app(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    body = json.dumps({"model": "fake", "messages": SLOW, "stream": True}).encode()
    request = urllib.request.Request(
        f"{proxy.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=50) as answer:
        first = answer.read(1)  # a keep-alive: both siblings are being sampled
        (engine,) = child_pids(server.pid)
        os.kill(engine, signal.SIGKILL)
        streamed = first + answer.read()
    assert b'"error"' not in streamed and streamed.endswith(b"data: [DONE]\n\n")
    assert "starting it again" in server.log
    (group,) = wait_for_groups(proxy, 1)
    assert (group["state"], group["status"]) == ("pooled", 200)
