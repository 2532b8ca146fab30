"""Hooks come only from the files that are named at the start, never from a request."""

from __future__ import annotations

from pathlib import Path

import httpx
from starlette.routing import Route

from fakevllm.config.model import load
from fakevllm.web.app import create_app, create_routes
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.formats.registry import ADAPTERS
from tests.e2e.hook_files import PREFER_YES, write_hooks

UNREACHABLE_SERVER = "http://127.0.0.1:9"
"""The discard port, on which no server listens."""
VERBS = ("POST", "PUT", "PATCH", "GET", "DELETE")


async def test_no_route_accepts_hook_code_or_the_path_of_a_hook_file(tmp_path: Path) -> None:
    ours = write_hooks(tmp_path / "ours", PREFER_YES)
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w')\n{PREFER_YES}"
    theirs = write_hooks(tmp_path / "theirs", code, "def on_user_submit_new_requests(*_): ...")
    flags = {
        "proxy": {"run_dir": tmp_path / "run"},
        "hooks": {"path": ours},
        "swarm": {"url": UNREACHABLE_SERVER},
        "upstream": {"hold_s": 0},
    }
    async with open_proxy(load(None, flags)) as proxy:
        app = create_app(proxy)
        routes = create_routes(
            proxy, dict.fromkeys((one.path for one in ADAPTERS.values()), app)
        ).routes
        paths = {route.path for route in routes if isinstance(route, Route)}
        assert "/v1/chat/completions" in paths and "/fakevllm/stats" in paths
        fields = {"hooks": {"path": str(theirs)}, "path": str(theirs), "hook": code, "code": code}
        task = {"task_id": "a", "main_query": "b", "metadata": fields}
        body = fields | {"tasks": [task], "messages": []}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            params = {"hooks": str(theirs), "path": str(theirs)}
            for path in sorted(paths | {"/hooks", "/fakevllm/hooks", "/fakevllm/config"}):
                for verb in VERBS:
                    await client.request(verb, path, json=body, params=params)
    assert not marker.exists()
    assert [file.name for file in ours.glob("*.py")] == ["on_compute_relative_reward.py"]
    assert (ours / "on_compute_relative_reward.py").read_text() == PREFER_YES
