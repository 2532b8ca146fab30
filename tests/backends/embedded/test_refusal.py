"""A model the engine refuses leaves the server offline and says why, instead of trying for ever."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.processes import Processes, wait_until


def test_a_model_of_no_known_kind_leaves_the_engine_offline_with_the_reason(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    with Processes(tmp_path) as started:
        server = started.server("--backend", "embedded", "--model", str(model))
        proxy = started.proxy(server, wait=False)

        def refused() -> bool:
            status = httpx.get(f"{server.url}/get_engine_status").json()
            return "cannot read the config" in (status["engine_status_detail"] or "")

        wait_until(refused, 40, "the refusal")
        status = httpx.get(f"{server.url}/get_engine_status").json()
        assert status["engine_status"] == "ENGINE.OFFLINE"
        wait_until(lambda: "cannot read the config" in proxy.log, 10, "the proxy to tell")
        body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert "cannot read the config" in answer.json()["error"]["message"]
