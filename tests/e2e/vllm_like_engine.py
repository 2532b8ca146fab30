"""A server that behaves like a vLLM that a user has started, with a real model.

The embedded engine samples, in a process of its own. This program listens on a TCP port, relays
requests to the engine, and adds what only vLLM has: the routes that replace the weights, and the
log-probabilities of a prompt. While it is paused, new requests wait.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.types.engine_spec import EngineSpec

BUNDLED_ENGINES_ONLY = "return_weight_versions"
"""Field of a request that vLLM ignores."""


class VllmLikeEngine:
    """vLLM's routes in front of an embedded engine."""

    def __init__(self, engine: ChildEngine, http: aiohttp.ClientSession) -> None:
        self._engine = engine
        self._http = http
        self._num_loads = 0
        self._resumed = asyncio.Event()
        self._resumed.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.get("/is_paused", self._is_paused),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/collective_rpc", self._reload),
                web.post("/reset_prefix_cache", self._succeed),
                web.post("/update_weight_version", self._succeed),
                web.post("/v1/chat/completions", self._sample),
                web.post("/v1/completions", self._sample),
                web.get("/{path:health|version|v1/models|metrics|server_info}", self._relay),
                web.post("/{path:tokenize|detokenize}", self._relay),
            ]
        )
        return app

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self._resumed.is_set()})

    async def _succeed(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        self._resumed.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def _reload(self, request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        self._num_loads += 1
        await self._engine.load_weights(folder, self._num_loads)
        return web.json_response({"results": [None]})

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        await self._resumed.wait()
        if body.get("prompt_logprobs"):
            return await self._prompt_logprobs(body["prompt"])
        body.pop(BUNDLED_ENGINES_ONLY, None)
        return await self._relay(request, orjson.dumps(body))

    async def _prompt_logprobs(self, ids: list[int]) -> web.Response:
        """Return the log-probabilities of the known prompt, the only prompt for which they are
        requested."""
        reply = await self._engine.probe()
        assert list(reply.ids) == ids, "another prompt than the known one"
        pairs = zip(ids[1:], reply.log_probs, strict=True)
        entries = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        return web.json_response({"choices": [{"index": 0, "prompt_logprobs": entries}]})

    async def _relay(
        self, request: web.Request, changed_body: bytes | None = None
    ) -> web.StreamResponse:
        body = await request.read() if changed_body is None else changed_body
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        async with self._http.request(
            request.method, request.path_qs, data=body or None, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


async def _serve(port: int) -> None:
    engine = ChildEngine(EngineSpec("embedded", Path.cwd(), str(DEMO_MODEL_DIR), "demo"))
    endpoint = await engine.launch()
    connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0)
    async with aiohttp.ClientSession(endpoint.url, connector=connector) as http:
        runner = web.AppRunner(VllmLikeEngine(engine, http).app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.to_thread(sys.stdin.buffer.read)
        await runner.cleanup()
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-closes", action="store_true")
    asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
