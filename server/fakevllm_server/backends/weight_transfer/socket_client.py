"""Client of vLLM's weight transfer routes over its Unix socket, for threads of a trainer's process.

The client has the methods of vLLM's protocol VLLMWeightSyncClient, so vLLM's own sending code can
use it. vLLM's client speaks TCP only.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
from http.client import HTTPConnection, HTTPException
from typing import Any

from fakevllm_server.types.backend import BackendError

ROUTE_TIMEOUT_S = 300.0
"""Timeout of one request. The largest request has MAX_CHUNK_BYTES of weights, or one weight."""
MAX_DETAIL_CHARS = 300

Json = dict[str, Any]


class SocketClient:
    """Sends requests to the vLLM at one Unix socket. Each request has a connection of its own,
    because vLLM may close an idle connection at any time."""

    def __init__(self, path: str) -> None:
        self._path = path

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: Json) -> None:
        handles = update_info.pop("ipc_handles", None)
        if handles is not None:
            # Handles of CUDA memory are no JSON. vLLM unpickles them only if it was started with
            # VLLM_ALLOW_INSECURE_SERIALIZATION, which the server sets for its own vLLM alone.
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = update_info | {"ipc_handles_pickled": pickled}
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._post("finish_weight_update", body)

    def _post(self, route: str, body: Json) -> None:
        """Send a POST request. Raise BackendError if vLLM does not answer, or refuses."""
        connection = _UnixConnection(self._path)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/{route}", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise BackendError(f"vLLM did not answer {route}: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            detail = " ".join(text.split())[:MAX_DETAIL_CHARS]
            raise BackendError(f"vLLM failed in {route} (HTTP {response.status}): {detail}")


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=ROUTE_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
