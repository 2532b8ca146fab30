"""Requests that a replay sends to the proxy before the first dataset row and after the last one.

Some requests register the dataset's tasks, and get an API key for each task. Other requests ask for
the model's name, whether the proxy trains all rows, and whether the proxy runs in lockstep (the
mode for reproducible runs). The last request asks whether hooks failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from fakevllm.config.upstream import checked_http_url
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import (
    FAN_OUT_NO_HOOKS,
    FAN_OUT_PAUSED,
    no_proxy,
    not_a_proxy,
    proxy_root,
)
from fakevllm.runtime.plurals import counted
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task

TASKS_PER_CALL = 500
_CONFLICT = (
    "Rows of this dataset were registered with another API key: pass that key with --key, or "
    "change the file (an empty line at its end is enough), because the ids of the rows depend on "
    "the content of the file."
)

_NONE_TRAIN = "These rows will not be trained:"
_SOME_TRAIN = "Only some of these rows will be trained:"
_GATED = (
    'each row is a session of its own, and with release.mode "gated", only release.canary_share of '
    'the sessions train; to train all rows, set the mode to "continuous"'
)
_BASELINE = (
    "each row is a session of its own, and release.baseline_share of the sessions do not train; to "
    "train all rows, set it to 0"
)


async def register_tasks(url: str, tasks: list[Task], key: str | None = None) -> dict[str, str]:
    """Register the tasks at the proxy. Return a dict from the id of each task to the API key that
    requests for this task must use.

    Raises ConfigError if the proxy does not answer or refuses the request.
    """
    keys: dict[str, str] = {}
    try:
        async with aiohttp.ClientSession(headers=bearer_header(key)) as http:
            for start in range(0, len(tasks), TASKS_PER_CALL):
                part = tasks[start : start + TASKS_PER_CALL]
                body = {"tasks": [task.model_dump() for task in part]}
                async with http.post(f"{proxy_root(url)}/fakevllm/tasks", json=body) as answer:
                    if answer.status == 409:
                        raise ConfigError(_CONFLICT)
                    _raise_for_status(answer)
                    new_keys: list[str] = (await answer.json())["keys"]
                keys |= dict(zip([task.task_id for task in part], new_keys, strict=True))
    except aiohttp.ClientError as error:
        raise _unreachable(url, error) from None
    return keys


@dataclass(frozen=True, slots=True)
class TrainingNotice:
    """A notice that the proxy, in its present state, does not train all rows of a replay."""

    text: str
    reason: str
    """The reason, without a full stop at its end. If no row is trained, the reason begins with the
    words that `fakevllm status` prints in this case."""


async def training_notice(url: str, key: str | None = None) -> TrainingNotice | None:
    """Return a notice if the proxy, in its present state, would not train all rows of a replay.
    Return None if the proxy would train all rows. Raises ConfigError if the proxy does not answer
    or refuses the request."""
    stats = await _get_json(url, "/fakevllm/stats", key)
    if stats.get("paused"):
        reason = f"{FAN_OUT_PAUSED}; run `fakevllm resume` to end the pause"
        return TrainingNotice(_NONE_TRAIN, reason)
    if not stats.get("has_hooks", True):
        return TrainingNotice(_NONE_TRAIN, FAN_OUT_NO_HOOKS)
    release = stats.get("release")
    if release is not None and release.get("has_released_arm", True):
        return TrainingNotice(_SOME_TRAIN, _GATED)
    return None if stats.get("arms") is None else TrainingNotice(_SOME_TRAIN, _BASELINE)


async def hook_notice(url: str, key: str | None = None) -> str | None:
    """Return a sentence if a hook failed for some of the latest groups, so that they were not
    trained. Return None if no hook failed, or if the proxy does not answer any more."""
    try:
        stats = await _get_json(url, "/fakevllm/stats", key)
    except ConfigError:  # isolates: the rows are answered, and the proxy may have been stopped
        return None
    failed = stats.get("hook_failures")
    if failed is None:
        return None
    latest = f"{failed['num_failed']} of the latest {counted(failed['num_groups'], 'group')}"
    return f"Not trained, because a hook failed: {latest} ({failed['reason']})."


async def first_model(url: str, key: str | None = None) -> str:
    """Return the name of the first model in the proxy's list. Raises ConfigError if the list cannot
    be requested, or is empty."""
    try:
        async with (
            aiohttp.ClientSession(headers=bearer_header(key)) as http,
            http.get(f"{url}/models") as answer,
        ):
            _raise_for_status(answer)
            models = (await answer.json())["data"]
    except aiohttp.ClientError as error:
        raise ConfigError(_no_model(url, str(error))) from None
    if not models:
        raise ConfigError(_no_model(url, "the list is empty"))
    return models[0]["id"]


def _no_model(url: str, cause: str) -> str:
    return f"{url} lists no model ({cause}): is the engine up? Or set --model."


async def require_lockstep(url: str, key: str | None = None) -> None:
    """Raise ConfigError unless the proxy and its server run in lockstep. In this mode, two runs
    with the same seed give identical results."""
    reply = await _get_json(url, "/fakevllm/engine", key)
    status = None if reply is None else EngineStatusReply.model_validate(reply)
    if status is None or not status.lockstep:
        raise ConfigError(
            f"{url} does not run in lockstep: end `fakevllm serve` and `fakevllm-server start`, "
            "start both again, the proxy with --lockstep, and wait until its engine is up."
        )


async def _get_json(url: str, path: str, key: str | None) -> Any:
    """Send a GET request for `path` to the proxy, and return the JSON of its reply. Raises
    ConfigError if the proxy does not answer or refuses the request."""
    try:
        async with (
            aiohttp.ClientSession(headers=bearer_header(key)) as http,
            http.get(f"{proxy_root(url)}{path}") as answer,
        ):
            _raise_for_status(answer)
            return await answer.json()
    except aiohttp.ClientError as error:
        raise _unreachable(url, error) from None


def checked_url(url: str) -> str:
    """Return `url` if it is an HTTP URL. Raises ConfigError otherwise."""
    try:
        return checked_http_url(url)
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from None


def _unreachable(url: str, error: aiohttp.ClientError) -> ConfigError:
    if isinstance(error, aiohttp.ClientResponseError) and error.status >= 400:
        return ConfigError(not_a_proxy(url, error.status))
    return ConfigError(no_proxy(url, error))


def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 401:
        raise ConfigError("The proxy requires an API key: pass one of its keys with --key.")
    answer.raise_for_status()
