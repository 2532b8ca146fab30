"""Hooks come from the files named at the start. Nothing that is sent to the proxy becomes one."""

from __future__ import annotations

from pathlib import Path

import httpx
from starlette.routing import Route

from fakevllm.config.model import load
from fakevllm.web.app import create_app, create_routes
from fakevllm.web.components import open_proxy
from fakevllm_adapters.formats.registry import ADAPTERS
from tests.e2e.hook_files import PREFER_YES, write_hooks

SERVER_THAT_IS_NONE = "http://127.0.0.1:9"
"""The discard port: nobody answers."""
VERBS = ("POST", "PUT", "PATCH", "GET", "DELETE")


async def test_no_route_takes_hook_code_or_the_name_of_a_file_with_it(tmp_path: Path) -> None:
    ours = write_hooks(tmp_path / "ours", PREFER_YES)
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w')\n{PREFER_YES}"
    theirs = write_hooks(tmp_path / "theirs", code, "def on_user_submit_new_requests(*_): ...")
    flags = {
        "proxy": {"run_dir": tmp_path / "run"},
        "hooks": {"path": ours},
        "swarm": {"url": SERVER_THAT_IS_NONE},
        "upstream": {"hold_s": 0},
    }
    async with open_proxy(load(None, flags)) as proxy:
        app = create_app(proxy)
        routes = create_routes(
            proxy, dict.fromkeys((one.path for one in ADAPTERS.values()), app)
        ).routes
        paths = {route.path for route in routes if isinstance(route, Route)}
        assert "/v1/chat/completions" in paths and "/fakevllm/stats" in paths
        sent = {"hooks": {"path": str(theirs)}, "path": str(theirs), "hook": code, "code": code}
        task = {"task_id": "a", "main_query": "b", "metadata": sent}
        body = sent | {"tasks": [task], "messages": []}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = {"hooks": str(theirs), "path": str(theirs)}
            for path in sorted(paths | {"/hooks", "/fakevllm/hooks", "/fakevllm/config"}):
                for verb in VERBS:
                    await client.request(verb, path, json=body, params=asked)
    assert not marker.exists()
    assert [file.name for file in ours.glob("*.py")] == ["on_compute_relative_reward.py"]
    assert (ours / "on_compute_relative_reward.py").read_text() == PREFER_YES
