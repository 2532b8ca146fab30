"""What somebody new does wrong is said where it can be seen."""

from __future__ import annotations

import httpx

from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Processes
from tests.e2e.test_traffic import HI, answered, command


def test_a_base_url_without_v1_is_a_warning_once_for_each_path(processes: Processes) -> None:
    proxy = processes.proxy(processes.server("--backend", "fake"))
    for path in ("/chat/completions", "/chat/completions", "/v1/v1/chat/completions", "/else"):
        assert httpx.post(f"{proxy.url}{path}", json=HI).status_code == 404
    answered(proxy)
    warned = [line for line in proxy.log.splitlines() if "is no path of this proxy" in line]
    assert [line.partition(" is no path")[0].split()[-1] for line in warned] == [
        "/chat/completions",
        "/v1/v1/chat/completions",
    ]
    assert "http://HOST:PORT/v1" in warned[0]


def test_a_proxy_without_hooks_says_that_it_fans_nothing_out(processes: Processes) -> None:
    proxy = processes.proxy(processes.server("--backend", "fake"))
    answered(proxy)
    wait_for_groups(proxy, 1)
    status = " ".join(command(proxy, "status").split())
    assert "off: without hooks" in status and "requests are fanned out" not in status
