"""The requests of `fakevllm eval` to the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TypeVar

import aiohttp
from pydantic import BaseModel

from fakevllm.errors import ConfigError
from fakevllm.evaluation.messages import (
    CHECK_PATH,
    END_PATH,
    ROW_PATH,
    CheckReply,
    CheckRequest,
    EndReply,
    EndRequest,
    RowReply,
    RowRequest,
)
from fakevllm.replay.retry_deadline import RETRY_FOR_S, RetryDeadline
from fakevllm.runtime.admin_client import no_proxy, not_a_proxy, proxy_root
from fakevllm_adapters.protocol.keys import bearer_header

END_TIMEOUT_S = 10.0
"""Maximum seconds that the command waits at its end until its versions are unloaded. After Ctrl-C,
the server may still be loading a version. The server unloads this version only when the load is
complete."""
_MAY_SUCCEED_LATER = (429, 502, 503, 504)

M = TypeVar("M", bound=BaseModel)


class ProxyRequests:
    """A client of the proxy's routes for evaluations. Use it as an async context manager."""

    def __init__(self, url: str, key: str | None, retry_for_s: float = RETRY_FOR_S) -> None:
        self._url = proxy_root(url)
        self._retry_for_s = retry_for_s
        self._http = aiohttp.ClientSession(
            headers=bearer_header(key), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def __aenter__(self) -> ProxyRequests:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def check(self, texts: list[str], versions: list[int]) -> CheckReply:
        """Ask the proxy to check whether dataset rows with these texts can be evaluated, and to
        load the versions of the weights to evaluate. Raises ConfigError if the proxy does not
        answer or refuses the request."""
        return await self._post(
            CHECK_PATH, CheckRequest(texts=texts, versions=versions), CheckReply
        )

    async def end(self, versions: list[int]) -> None:
        """Tell the proxy that the evaluation no longer needs these versions of the weights. Errors
        are ignored, because the proxy unloads unused versions later, even without this message."""
        with contextlib.suppress(ConfigError, TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._post(END_PATH, EndRequest(versions=versions), EndReply)

    async def evaluate(self, row: RowRequest) -> RowReply:
        """Send one dataset row to the proxy, which samples answers to the row and scores them.
        While the proxy or its engine is unavailable, the request is repeated. Raises ConfigError if
        the proxy refuses the request."""
        deadline = RetryDeadline(self._retry_for_s)
        while True:
            try:
                return await self._post(ROW_PATH, row, RowReply)
            except _Unavailable:
                pause_s = deadline.pause(time.monotonic())
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _post(self, path: str, message: BaseModel, reply: type[M]) -> M:
        try:
            async with self._http.post(
                self._url + path, json=message.model_dump(mode="json")
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Unavailable(no_proxy(self._url, error)) from None
        if response.status == 401:
            raise ConfigError("The proxy requires an API key: pass one of its keys with --key.")
        if response.status == 404:
            raise ConfigError(
                f"The proxy at {self._url} does not know evaluations: update the proxy."
            )
        if response.status in _MAY_SUCCEED_LATER:
            raise _Unavailable(f"The proxy at {self._url} cannot sample: {_message(raw)}")
        if response.status != 200:
            raise ConfigError(f"The proxy at {self._url} refused a row: {_message(raw)}")
        try:
            return reply.model_validate_json(raw)
        except ValueError:
            raise ConfigError(not_a_proxy(self._url, response.status)) from None


class _Unavailable(ConfigError):
    """Raised if the proxy or its engine cannot be reached at the moment. A later request may
    succeed."""


class _Error(BaseModel):
    class Body(BaseModel):
        message: str

    error: Body


def _message(raw: bytes) -> str:
    """Return the message of an error reply. If the reply has no such message, return the beginning
    of the reply."""
    try:
        return _Error.model_validate_json(raw).error.message
    except ValueError:
        return raw[:200].decode(errors="replace")
