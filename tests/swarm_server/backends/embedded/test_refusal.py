"""A model the engine refuses leaves the server offline; a job its trainer refuses does not. Both
say why, instead of trying for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Processes, wait_until

pytestmark = pytest.mark.slow


def test_a_model_of_unknown_type_leaves_the_engine_offline_with_the_reason(
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
        wait_until(lambda: "cannot read the config" in proxy.log, 10, "the proxy to report")
        body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=body)
    assert answer.status_code == 503
    assert "cannot read the config" in answer.json()["error"]["message"]


def test_a_job_that_the_trainer_refuses_leaves_the_engine_serving(tmp_path: Path) -> None:
    """Sampler and trainer are one process, which then serves without training."""
    job = tmp_path / "job.toml"
    job.write_text('[job]\nlr = 1e-4\nlora_rank = 4\ntarget_modules = "nope"\n')
    with Processes(tmp_path) as started:
        server = started.server("--backend", "embedded", "--model", "demo")
        proxy = started.proxy(server, "--config", str(job))
        body = {
            "model": "x",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "What is 1 plus 2?"}],
        }
        served = httpx.get(f"{proxy.url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=body | {"model": served})
        assert answer.status_code == 200
        status = httpx.get(f"{server.url}/get_engine_status").json()
        detail = status["engine_status_detail"]
        for part in ("training is off, serving goes on", "'nope'", "name some of these", "again"):
            assert part in detail
        assert "\n" not in detail
        assert detail in server.log
        wait_until(lambda: detail in proxy.log, 10, "the proxy to report")
        shown = subprocess.run(
            [sys.executable, "-m", "fakevllm", "status", "--url", proxy.url],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "1000"},
        )
        assert detail in shown.stdout
