"""A simulated vLLM server for tests. The simulation has vLLM's control routes, and a deterministic
policy instead of a model.

    python -m fakevllm_server.backends.vllm.simulated_vllm FOLDER --uds PATH [--fault NAME]

The simulation behaves as follows:

* It reports the logprobs of its policy at the requested temperature.
* Its weights are the text of the file `weights.txt` in the weights folder. This text is the content
  of every answer that is given without an adapter.
* The content of an answer with an adapter is the text of the adapter's file `weights.txt`. Adapters
  need the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING, and a folder with an
  adapter_config.json.
* It samples nothing while it is paused.
* After a failed reload of the weights, the text HALF_LOADED takes the place of the weights.
* A weight transfer sends the weights in pieces of this text. From its start to its end, the text
  HALF_LOADED takes the place of the weights.
* While it sleeps, it is paused. It serves again when weights and cache are awake.

Each `Fault` makes the simulation behave like a vLLM with one wrong setting or one failure.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from fakevllm_server.backends.vllm.capability_checks import UPDATE_ROUTES

Json = dict[str, Any]

TRANSFER_ROUTES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
TRANSFER_START = "start_weight_update"
SLEEP_ROUTES = ("/sleep", "/wake_up")
VOCABULARY = 32
PROMPT_IDS = [5, 6, 7]
MAX_MODEL_LEN = 512
WEIGHTS_FILE = "weights.txt"
HALF_LOADED = "half-loaded"
"""The simulated weights after a failed reload, and therefore the content of the answers."""
KEY = "secret"


class Fault(StrEnum):
    RAW_LOGPROBS = "raw-logprobs"
    NO_LOGPROBS = "no-logprobs"
    NO_TOKEN_IDS = "no-token-ids"
    NO_DEV_MODE = "no-dev-mode"
    NO_TOOLS = "no-tools"
    NO_VERSION_ROUTE = "no-version-route"
    VERSION_FAILS = "version-fails"
    PAUSE_FAILS = "pause-fails"
    PAUSE_STAYS = "pause-stays"
    ONE_COMPLETION_FAILS = "one-completion-fails"
    WANTS_KEY = "wants-key"
    ONE_RELOAD_FAILS = "one-reload-fails"
    RELOADS_FAIL = "reloads-fail"
    DIES_IN_RELOAD = "dies-in-reload"
    SAMPLES_NOTHING = "samples-nothing"
    CACHE_STAYS = "cache-stays"
    TRANSFERS_FAIL = "transfers-fail"
    SLEEP_FAILS = "sleep-fails"
    WAKE_UP_FAILS = "wake-up-fails"
    ADAPTERS_FAIL = "adapters-fail"
    ONE_ADAPTER_REPLY_IS_LOST = "one-adapter-reply-is-lost"
    ONE_UNLOAD_FAILS = "one-unload-fails"


class SimulatedVllm:
    def __init__(self, folder: Path, name: str = "simulated", faults: Collection[str] = ()) -> None:
        self.name = name
        self.faults = {Fault(fault) for fault in faults}
        self.weights = _read_weights(folder)
        self.is_paused = False
        self.version: str | None = None
        self.control_requests: list[str] = []
        """The requested control routes, in the order of the requests. Routes of SLEEP_ROUTES are
        with their query."""
        self.sleeping: set[str] = set()
        """What sleeps, by the names of vLLM's tags."""
        self.updates: list[str] = []
        """The pieces of new weights that the last complete weight transfer has sent."""
        self._update: list[str] | None = None
        """The pieces of new weights that a weight transfer has sent. None if there is none."""
        self.adapters: dict[str, str] = {}
        """Maps the name of each loaded adapter to the content of its answers."""
        self._resumed = asyncio.Event()
        self._resumed.set()

    def app(self) -> web.Application:
        """Return the HTTP application of the simulated vLLM."""
        app = web.Application(client_max_size=2**30)  # vLLM has no limit
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._chat),
                web.post("/tokenize", self._tokenize),
            ]
        )
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            app.add_routes([web.post("/v1/load_lora_adapter", self._load_adapter)])
            app.add_routes([web.post("/v1/unload_lora_adapter", self._unload_adapter)])
        if Fault.NO_DEV_MODE not in self.faults:
            app.add_routes([web.post(route, self._control) for route in UPDATE_ROUTES])
            app.add_routes([web.post(route, self._transfer) for route in TRANSFER_ROUTES])
            app.add_routes([web.post(route, self._sleep_or_wake) for route in SLEEP_ROUTES])
            app.add_routes([web.get("/get_world_size", self._world_size)])
            app.add_routes([web.get("/control_requests", self._control_requests)])
            app.add_routes([web.get("/is_paused", self._paused)])
            if Fault.NO_VERSION_ROUTE not in self.faults:
                app.add_routes([web.post("/update_weight_version", self._update_version)])
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.27.1+simulated"})

    async def _paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _models(self, request: web.Request) -> web.Response:
        if Fault.WANTS_KEY in self.faults and request.headers.get("Authorization") != _BEARER:
            return web.json_response({"error": "Unauthorized"}, status=401)
        card = {"id": self.name, "object": "model", "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        if body.get("tools") and Fault.NO_TOOLS in self.faults:
            text = '"auto" tool choice requires --enable-auto-tool-choice'
            return web.json_response({"error": {"message": text}}, status=400)
        if Fault.ONE_COMPLETION_FAILS in self.faults:
            self.faults.discard(Fault.ONE_COMPLETION_FAILS)
            return _server_error("EngineCore is busy")
        await self._resumed.wait()
        if Fault.SAMPLES_NOTHING in self.faults:
            await asyncio.Event().wait()
        # vLLM writes no space after a colon or a comma.
        return web.json_response(body=orjson.dumps(self._completion(body)))

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if Fault.ADAPTERS_FAIL in self.faults:
            return _server_error("expected target modules in ['q_proj']")
        if name in self.adapters:
            text = f"The lora adapter '{name}' has already been loaded."
            return web.json_response({"error": {"message": text}}, status=400)
        if not (folder / "adapter_config.json").is_file():
            return web.json_response({"error": {"message": f"No adapter in {folder}"}}, status=404)
        self.adapters[name] = _read_weights(folder)
        if Fault.ONE_ADAPTER_REPLY_IS_LOST in self.faults:
            self.faults.discard(Fault.ONE_ADAPTER_REPLY_IS_LOST)
            assert request.transport is not None, "the client waits for the response"
            request.transport.abort()
        return web.Response()

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        if Fault.ONE_UNLOAD_FAILS in self.faults:
            self.faults.discard(Fault.ONE_UNLOAD_FAILS)
            return _server_error("EngineCore is busy")
        known = self.adapters.pop((await request.json())["lora_name"], None)
        return web.Response(status=404 if known is None else 200)

    async def _tokenize(self, request: web.Request) -> web.Response:
        num_tokens = len((await request.json())["prompt"].split())
        ids = [number % VOCABULARY for number in range(num_tokens)]
        return web.json_response({"tokens": ids, "count": num_tokens})

    async def _control(self, request: web.Request) -> web.Response:
        self.control_requests.append(request.path.strip("/"))
        match request.path:
            case "/pause" if Fault.PAUSE_FAILS in self.faults:
                return _server_error("no pause")
            case "/resume" if Fault.PAUSE_STAYS in self.faults:
                return _server_error("no resume")
            case "/pause":
                self.is_paused = True
                self._resumed.clear()
            case "/resume":
                self.is_paused = False
                self._resumed.set()
            case "/reset_prefix_cache":
                return web.json_response({"success": Fault.CACHE_STAYS not in self.faults})
            case _:
                return self._reload(await request.json())
        return web.json_response({"status": "done"})

    async def _transfer(self, request: web.Request) -> web.Response:
        """Answer a route of a weight transfer, in the order that vLLM demands."""
        route = request.path.strip("/")
        self.control_requests.append(route)
        body: Json = await request.json()
        is_started = self._update is not None
        if route != "init_weight_transfer_engine" and is_started == (route == TRANSFER_START):
            return _server_error(f"{route} out of order")
        if self._update is None:
            self._update = [] if route == TRANSFER_START else None
            self.weights = HALF_LOADED if route == TRANSFER_START else self.weights
        elif route == "update_weights":
            if Fault.TRANSFERS_FAIL in self.faults:
                self._update = None
                return _server_error("shapes differ")
            self._update.append(body["update_info"]["weights"])
        else:
            self.weights = "".join(self._update) or HALF_LOADED
            self.updates, self._update = self._update, None
        return web.json_response({"message": "done"})

    async def _sleep_or_wake(self, request: web.Request) -> web.Response:
        self.control_requests.append(request.path_qs.strip("/"))
        if request.path == "/sleep":
            if Fault.SLEEP_FAILS in self.faults:
                return _server_error("no sleep")
            self.sleeping = {"weights", "kv_cache"}
            self.is_paused = True
            self._resumed.clear()
        elif Fault.WAKE_UP_FAILS in self.faults:
            return _server_error("no memory")
        else:
            self.sleeping -= set(request.query.getall("tags"))
            if not self.sleeping:
                self.is_paused = False
                self._resumed.set()
        return web.Response()

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _control_requests(self, request: web.Request) -> web.Response:
        """Return the requested control routes. vLLM has no such route."""
        return web.json_response(self.control_requests)

    async def _update_version(self, request: web.Request) -> web.Response:
        self.control_requests.append(request.path.strip("/"))
        if Fault.VERSION_FAILS in self.faults:
            return _server_error("no version")
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    def _reload(self, body: Json) -> web.Response:
        self.weights = HALF_LOADED
        if "weights" in self.sleeping:
            return _server_error("the weights have no memory")
        if self._update is not None:
            return _server_error("layers are loaded in part")
        if Fault.DIES_IN_RELOAD in self.faults:
            os._exit(70)
        folder = Path(body["kwargs"]["weights_path"])
        fails = self.faults & {Fault.RELOADS_FAIL, Fault.ONE_RELOAD_FAILS}
        self.faults.discard(Fault.ONE_RELOAD_FAILS)
        if fails or not folder.is_dir():
            return _server_error(f"Worker failed with error 'no weights in {folder}'")
        self.weights = _read_weights(folder)
        return web.json_response({"results": [None]})

    def _completion(self, body: Json) -> Json:
        name = body.get("model") or self.name
        content = self.adapters.get(name, self.weights)
        num_tokens = min(4, int(body.get("max_tokens", 4)))
        ids = list(range(num_tokens))
        choice: Json = {"index": 0, "message": {"role": "assistant", "content": content}}
        choice |= {"finish_reason": "length", "logprobs": None, "token_ids": None}
        if body.get("logprobs") and Fault.NO_LOGPROBS not in self.faults:
            choice["logprobs"] = {"content": [self._logprob(token, body) for token in ids]}
        if body.get("prompt_logprobs") and Fault.NO_LOGPROBS not in self.faults:
            choice["prompt_logprobs"] = self._prompt_logprobs(body["prompt"])
        usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": num_tokens}
        completion: Json = {
            "object": "chat.completion",
            "model": name,
            "choices": [choice],
            "usage": usage,
        }
        if body.get("return_token_ids") and Fault.NO_TOKEN_IDS not in self.faults:
            choice["token_ids"] = ids
            completion["prompt_token_ids"] = PROMPT_IDS
        return completion

    def _logprob(self, token: int, body: Json) -> Json:
        raw = Fault.RAW_LOGPROBS in self.faults
        logprobs = policy(1.0 if raw else float(body.get("temperature", 1.0)))
        top = range(int(body.get("top_logprobs", 0)))
        alternatives = [{"token": f"token_id:{other}", "logprob": logprobs[other]} for other in top]
        return {
            "token": f"token_id:{token}",
            "logprob": logprobs[token],
            "top_logprobs": alternatives,
        }

    def _prompt_logprobs(self, ids: list[int]) -> list[Json | None]:
        """Return the logprobs of a prompt. The logprobs depend on the weights, as the logprobs of a
        real model do."""
        logprobs = policy(1.0 + len(self.weights))
        return [None, *({str(token): {"logprob": logprobs[token]}} for token in ids[1:])]


def _server_error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=500)


def policy(temperature: float) -> list[float]:
    """Return the logprobs of all tokens of the vocabulary at a temperature. The tokens are ordered
    from the most likely to the least likely. The logprobs do not depend on the prompt."""
    logits = [-0.25 * token / temperature for token in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


_BEARER = f"Bearer {KEY}"


def _read_weights(folder: Path) -> str:
    file = folder / WEIGHTS_FILE
    return file.read_text() if file.is_file() else "untrained"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--fault", action="append", default=[], choices=list(Fault))
    parser.add_argument("--served-model-name", default="simulated")
    # Other arguments of vLLM have no effect here.
    arguments, _ = parser.parse_known_args()
    engine = SimulatedVllm(arguments.model, arguments.served_model_name, arguments.fault)
    web.run_app(engine.app(), path=arguments.uds, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
