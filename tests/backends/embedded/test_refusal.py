"""A model the engine refuses leaves the server offline and says why, instead of trying for ever."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.processes import Processes, wait_until


def test_a_folder_that_is_no_model_leaves_the_engine_offline_with_the_reason(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    with Processes(tmp_path) as started:
        server = started.server("--backend", "embedded", "--model", str(tmp_path / "empty"))
        proxy = started.proxy(server, wait=False)

        def refused() -> bool:
            status = httpx.get(f"{server.url}/get_engine_status").json()
            return "has no config.json" in (status["engine_status_detail"] or "")

        wait_until(refused, 40, "the refusal")
        status = httpx.get(f"{server.url}/get_engine_status").json()
        assert status["engine_status"] == "ENGINE.OFFLINE"
        wait_until(lambda: "has no config.json" in proxy.log, 10, "the proxy to tell")
        body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert "has no config.json" in answer.json()["error"]["message"]
