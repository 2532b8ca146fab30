"""What a replay asks the proxy before it plays: keys for its tasks, the model's name,
and whether it runs in lockstep."""

from __future__ import annotations

from typing import Any

import aiohttp

from fakevllm.config.upstream import checked_http_url
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import FAN_OUT_NO_HOOKS, FAN_OUT_PAUSED, not_a_proxy, proxy_root
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task

TASKS_PER_CALL = 500


async def register(url: str, tasks: list[Task], key: str | None = None) -> dict[str, str]:
    """Makes the tasks known to the proxy; returns the API key of each by its id. Raises
    ConfigError."""
    keys: dict[str, str] = {}
    try:
        async with aiohttp.ClientSession(headers=bearer_header(key)) as http:
            for start in range(0, len(tasks), TASKS_PER_CALL):
                part = tasks[start : start + TASKS_PER_CALL]
                body = {"tasks": [task.model_dump() for task in part]}
                async with http.post(f"{proxy_root(url)}/fakevllm/tasks", json=body) as answer:
                    _let_in(answer)
                    given: list[str] = (await answer.json())["keys"]
                keys |= dict(zip([task.task_id for task in part], given, strict=True))
    except aiohttp.ClientError as error:
        raise _unreached(url, error) from None
    return keys


async def why_untrained(url: str, key: str | None = None) -> str | None:
    """What keeps every row from being trained now, as `fakevllm status` tells it; None where it
    knows of nothing. Raises ConfigError."""
    stats = await _got(url, "/fakevllm/stats", key)
    if stats.get("paused"):
        return f"{FAN_OUT_PAUSED}; `fakevllm resume` ends that"
    return None if stats.get("has_hooks", True) else FAN_OUT_NO_HOOKS


async def first_model(url: str, key: str | None = None) -> str:
    """The first model the proxy lists. Raises ConfigError."""
    try:
        async with (
            aiohttp.ClientSession(headers=bearer_header(key)) as http,
            http.get(f"{url}/models") as answer,
        ):
            _let_in(answer)
            return (await answer.json())["data"][0]["id"]
    except aiohttp.ClientError as error:
        raise ConfigError(
            f"{url} lists no model ({error}): is the engine up? Or set --model."
        ) from None


async def need_lockstep(url: str, key: str | None = None) -> None:
    """Raises ConfigError unless the proxy and its server run in lockstep."""
    told = await _got(url, "/fakevllm/engine", key)
    status = None if told is None else EngineStatusReply.model_validate(told)
    if status is None or not status.lockstep:
        raise ConfigError(
            f"{url} does not run in lockstep: end `fakevllm serve` and `fakevllm-server start`, "
            "start both again, the proxy with --lockstep, and wait until its engine is up."
        )


async def _got(url: str, path: str, key: str | None) -> Any:
    """The JSON the proxy answers there. Raises ConfigError."""
    try:
        async with (
            aiohttp.ClientSession(headers=bearer_header(key)) as http,
            http.get(f"{proxy_root(url)}{path}") as answer,
        ):
            _let_in(answer)
            return await answer.json()
    except aiohttp.ClientError as error:
        raise _unreached(url, error) from None


def checked_url(url: str) -> str:
    """Raises ConfigError."""
    try:
        return checked_http_url(url)
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from None


def _unreached(url: str, error: aiohttp.ClientError) -> ConfigError:
    if isinstance(error, aiohttp.ClientResponseError) and error.status >= 400:
        return ConfigError(not_a_proxy(url, error.status))
    return ConfigError(f"No fakevllm proxy answers at {url} ({error}): start it, or set --url.")


def _let_in(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 401:
        raise ConfigError("The proxy asks for an API key: give one of its key file with --key.")
    answer.raise_for_status()
