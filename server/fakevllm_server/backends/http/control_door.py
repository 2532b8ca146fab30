"""Control routes over a TrainEngine: `/control/…`, for the server that started the process."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import jsonable_numbers, pack_floats
from fakevllm_server.backends.training.partial_step import PartialStep
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    TokenEngine,
    TrainEngine,
)

Json = dict[str, Any]


class Control:
    """What the server asks of its own engine."""

    def __init__(self, engine: TokenEngine | None, trainer: TrainEngine) -> None:
        self._info: Json = {
            "model_name": "",
            "max_model_len": 0,
            "default_sampling": {},
            "reports_allowed": False,
        }
        if engine is not None:
            self._info = {name: getattr(engine, name) for name in self._info}
        self._trainer = trainer

    def routes(self) -> list[Route]:
        return [
            Route("/control/info", self.info),
            Route("/control/{action}", self.act, methods=["POST"]),
        ]

    async def info(self, request: Request) -> Response:
        return _json(self._info)

    async def act(self, request: Request) -> Response:
        try:
            body: Json = orjson.loads(await request.body())
            return _json(await self._act(request.path_params["action"], body) or {})
        except Exception as failure:
            traceback.print_exc()
            told: Json = {"error": f"{type(failure).__name__}: {failure}"}
            if isinstance(failure, PartialStep):
                told["is_partial"] = True
            if isinstance(failure, BackendRefused):
                told["refusal"] = str(failure)
            return _json(told, 500)

    async def _act(self, action: str, body: Json) -> Json | None:
        match action:
            case "boot":
                return {"told": await self._trainer.boot(TrainJob.model_validate(body["job"]))}
            case "step":
                calls = [Call.from_wire(call) for call in body["calls"]]
                batch = Batch(body["step"], calls, body["version"])
                return jsonable_numbers(await self._trainer.step(batch, LossSpec(**body["loss"])))
            case "log_probs":
                calls = [Call.from_wire(call) for call in body["calls"]]
                found = await self._trainer.log_probs(calls, body["policy"])
                return {"log_probs": [pack_floats(row) for row in found]}
            case "publish":
                await self._trainer.publish(body["version"])
            case "load_weights":
                await self._trainer.load_weights(Path(body["folder"]), body["version"])
            case "export":
                await self._trainer.export(Path(body["folder"]))
            case "save":
                await self._trainer.save(Path(body["folder"]))
            case "restore":
                await self._trainer.restore(Path(body["folder"]))
            case _:
                raise ValueError(f"no control action {action!r}")
        return None


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
