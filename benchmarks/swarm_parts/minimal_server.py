"""The baseline of `benchmarks.swarm_load`: a minimal server that accepts claims and ends of
episodes over HTTP, and writes each request to disk before it answers.

The server uses FastAPI and one SQLite table, with one insert and one flush for each request. The
server keeps no state of the episodes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import (
    ClaimEpisodeReply,
    ClaimEpisodeRequest,
    EndEpisodeRequest,
    SuccessReply,
)

INSERT = "INSERT INTO requests (kind, uuid, body) VALUES (?, ?, ?)"


def create_app(file: Path) -> FastAPI:
    """Return the app, with its database in `file`."""
    db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("CREATE TABLE IF NOT EXISTS requests (id INTEGER PRIMARY KEY, kind, uuid, body)")
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/claim_episode")
    async def claim_episode(request: ClaimEpisodeRequest) -> ClaimEpisodeReply:
        uuid = new_id()
        db.execute(INSERT, ("claim", uuid, request.client_uuid))
        return ClaimEpisodeReply(success=True, client_uuid=request.client_uuid, episode_uuid=uuid)

    @app.post("/end_episode")
    async def end_episode(request: EndEpisodeRequest) -> SuccessReply:
        db.execute(INSERT, ("end", request.episode_uuid, request.model_dump_json()))
        return SuccessReply(success=True)

    return app


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-closes", action="store_true", required=True)
    args = parser.parse_args()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    uvicorn.run(
        create_app(args.file),
        host="127.0.0.1",
        port=args.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=65,
    )


if __name__ == "__main__":
    main()
