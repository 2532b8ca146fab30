"""The route `/sync_train_code`, by which clients of the swarm protocol upload training code.

The protocol is from AgentJet, a framework for training agents. In AgentJet the trainer runs this
code. This server only stores the code, and never runs it. Without `--allow-train-code` the server
refuses the upload.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel

from fakevllm_adapters.http.asgi import read_body
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.web.routes.refusals import StrictRoute
from fakevllm_server.web.server_state import ServerState
from fakevllm_server.web.uploaded_code import MAX_ZIP_BYTES, BadArchive, unpack

_NOT_ALLOWED = (
    "This server accepts no training code, because it trains as its job says. If a client must "
    "send code, start the server with --allow-train-code: the code is then kept, and never run."
)


class SyncCodeReply(BaseModel):
    success: bool = True
    message: str = "Training code synced successfully."
    temp_ajet_code_path: str


def router(state: ServerState) -> APIRouter:
    """Return the HTTP route that accepts an upload of training code."""
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/sync_train_code")
    async def sync_train_code(request: Request) -> SyncCodeReply:
        """Keep the training code that a client uploads. The code is never run. The reply has status
        403 unless the server was started with `--allow-train-code`."""
        if not state.config.allow_train_code:
            raise HTTPException(403, _NOT_ALLOWED)
        if state.engine.status is not EngineStatus.OFFLINE:
            raise HTTPException(
                400,
                "Engine is already started. Call `stop_engine` first before syncing new training "
                "code.",
            )
        folder, stamp = state.config.run_dir / "train_code", time.strftime("%Y%m%d-%H%M%S")
        try:
            raw = await read_body(request.receive, MAX_ZIP_BYTES)
            code = await asyncio.to_thread(unpack, raw, folder, stamp)
        except WireError as error:
            raise HTTPException(error.status, error.message) from None
        except BadArchive as error:
            raise HTTPException(400, str(error)) from None
        except OSError as error:
            raise HTTPException(
                507, f"The training code cannot be written: {error.strerror}."
            ) from None
        return SyncCodeReply(temp_ajet_code_path=str(code.resolve()))

    return routes
