"""Control routes (`/control/…`) of an engine's process. The swarm server that started the process
drives a TrainEngine with these routes. A TrainEngine is the interface for training."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import jsonable_numbers, pack_floats
from fakevllm_server.backends.http.policies import PolicyEngine
from fakevllm_server.backends.training.failed_step import PartialStep
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    TokenEngine,
    TrainEngine,
)
from fakevllm_server.types.demonstrations import Demonstration
from fakevllm_server.types.weight_transfer import TransferTarget, WeightSender

Json = dict[str, Any]


class ControlRoutes:
    """The handlers of an engine's control routes. Only the swarm server uses these routes.

    GET `/control/info` describes the engine. POST `/control/{action}` runs one action of the
    trainer. If an action fails, the response has status 500 and the message in `error`.
    """

    def __init__(
        self,
        engine: TokenEngine | None,
        trainer: TrainEngine,
        policies: PolicyEngine | None = None,
    ) -> None:
        self._info: Json = {
            "model_name": "",
            "max_model_len": 0,
            "default_sampling": {},
            "reports_allowed": False,
        }
        if engine is not None:
            self._info = {name: getattr(engine, name) for name in self._info}
        self._engine = engine
        self._trainer = trainer
        self._policies = policies

    def routes(self) -> list[Route]:
        return [
            Route("/control/info", self.info),
            Route("/control/policies", self.policies),
            Route("/control/{action}", self.run_action, methods=["POST"]),
        ]

    async def info(self, request: Request) -> Response:
        """Return the engine's model name, context length and default sampling parameters as JSON.
        If the process only trains, these values are empty."""
        return _json(self._info)

    async def policies(self, request: Request) -> Response:
        """Return a JSON object that maps the name of each further policy (a set of weights beside
        the trained weights) to its version."""
        return _json({} if self._policies is None else self._policies.names.loaded)

    async def run_action(self, request: Request) -> Response:
        """Run the trainer action that the request path names, and return the action's result as
        JSON."""
        try:
            body: Json = await asyncio.to_thread(orjson.loads, await request.body())
            return _json(await self._run(request.path_params["action"], body) or {})
        # Translated at the boundary: the swarm server raises the error again in its own process.
        except Exception as error:
            traceback.print_exc()
            reply: Json = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, PartialStep):
                reply["is_partial"] = True
            if isinstance(error, BackendRefused):
                reply["refusal"] = str(error)
            return _json(reply, 500)

    async def _run(self, action: str, body: Json) -> Json | None:
        match action:
            case "boot":
                return {"told": await self._trainer.boot(TrainJob.model_validate(body["job"]))}
            case "step":
                batch = await asyncio.to_thread(_batch_in, body)
                return jsonable_numbers(await self._trainer.step(batch, LossSpec(**body["loss"])))
            case "log_probs":
                calls = await asyncio.to_thread(_calls_in, body)
                rows = await self._trainer.log_probs(calls, body["policy"])
                return {"log_probs": [pack_floats(row) for row in rows]}
            case "probe":
                return await self._probe()
            case "publish":
                await self._trainer.publish(body["version"])
            case "load_weights":
                await self._trainer.load_weights(Path(body["folder"]), body["version"])
            case "load_policy":
                folder = Path(body["folder"])
                await self._held().load_policy(body["name"], folder, body["version"])
            case "unload_policy":
                await self._held().unload_policy(body["name"])
            case "send_weights":
                await self._sender().send_weights(TransferTarget(**body["target"]))
            case "export":
                await self._trainer.export(Path(body["folder"]))
            case "export_adapters":
                await self._trainer.export_adapters(Path(body["folder"]), body["policy"])
            case "save":
                await self._trainer.save(Path(body["folder"]))
            case "restore":
                await self._trainer.restore(Path(body["folder"]))
            case _:
                raise ValueError(f"unknown control action {action!r}")
        return None

    async def _probe(self) -> Json:
        if self._engine is None:
            raise ValueError("this process does not sample")
        reply = await self._engine.probe()
        return {
            "ids": list(reply.ids),
            "log_probs": pack_floats(reply.log_probs),
            "dtype": reply.dtype,
            "num_layers": reply.num_layers,
        }

    def _sender(self) -> WeightSender:
        if not isinstance(self._trainer, WeightSender):
            raise ValueError("this trainer sends no weights")
        return self._trainer

    def _held(self) -> PolicyEngine:
        if self._policies is None:
            raise ValueError("this process holds no policies")
        return self._policies


def _batch_in(body: Json) -> Batch:
    """Parse the batch of a training step in a request body. Call this function on a worker thread,
    because parsing a large step takes seconds."""
    demonstrations = [Demonstration.from_wire(one) for one in body["demonstrations"]]
    return Batch(body["step"], _calls_in(body), body["version"], demonstrations)


def _calls_in(body: Json) -> list[Call]:
    """Parse the model calls in a request body, and return them. For a large step, parsing takes
    seconds. Call this function on a worker thread, because the event loop must continue to serve
    the streams of apps."""
    return [Call.from_wire(call) for call in body["calls"]]


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
