"""The settings of the running proxy, and the training job of the server. The functions block the
thread."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakevllm.config.setting_origins import Origin
from fakevllm.errors import ConfigError
from fakevllm.runtime.admin_client import Json, fetch_json
from fakevllm.sdk.engine_control import train_config
from fakevllm.sdk.http_driver import HttpDriver
from fakevllm.sdk.types import ServerUnreachable, SwarmError

TIMEOUT_S = 5.0
"""Maximum seconds that the page waits for the proxy."""
_PATH = "/fakevllm/configuration"
_JOB = "job"
_SHOWN_STATUS = {
    "model": "model",
    "max_model_len": "context length",
    "engine_version": "engine's version",
    "engine_status": "engine",
    "weight_version": "served version",
    "run_id": "run",
    "lockstep": "lockstep",
    "shares_calls": "one call samples several siblings",
    "training_limit": "newest version that training may make",
    "privacy": "redaction",
}
"""Fields of the server's status that are shown, with their names for readers."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting in a table."""

    name: str
    """Name within its section."""
    value: str
    origin: str
    at_server: str | None = None
    """Value in the server's training job, if it is another one."""

    @property
    def is_default(self) -> bool:
        return self.origin == Origin.DEFAULT


@dataclass(frozen=True, slots=True)
class SettingsView:
    """The proxy's settings, as the console shows them."""

    file: str | None = None
    """The proxy's configuration file; None if there is none."""
    sections: dict[str, list[SettingRow]] = field(default_factory=dict[str, list[SettingRow]])
    problem: str = ""
    """Why the proxy did not send its settings, and what to do about it."""
    job_problem: str = ""
    """Why the server's job is not known."""


def read_settings(
    proxy_url: str, proxy_key: str | None, server_url: str, server_key: str | None
) -> SettingsView:
    """Return the settings of the proxy, compared with the job of the server."""
    try:
        reply = fetch_json(proxy_url, _PATH, proxy_key, timeout_s=TIMEOUT_S)
    except ConfigError as error:  # translates: the page shows the sentence
        return SettingsView(problem=_explained(str(error), proxy_url))
    job, job_problem = _server_job(server_url, server_key)
    try:
        sections = sections_of(reply["settings"], job)
        file = reply["file"]
    except (LookupError, TypeError, AttributeError):  # translates foreign JSON
        return SettingsView(problem=_explained("", proxy_url))
    return SettingsView(None if file is None else str(file), sections, "", job_problem)


def sections_of(
    settings: Sequence[Json], job: dict[str, Any] | None
) -> dict[str, list[SettingRow]]:
    """Return the settings by section, in their order. `job` is the server's training job, or None
    if the job is unknown.

    >>> entry = {"key": "job.lr", "value": "0.1", "origin": "file"}
    >>> sections_of([entry], {"lr": 0.2})["job"][0].at_server
    '0.2'
    """
    sections = defaultdict[str, list[SettingRow]](list)
    for setting in settings:
        section, _, name = str(setting["key"]).partition(".")
        value, at_server = str(setting["value"]), None
        if section == _JOB and job is not None and name in job:
            text = json.dumps(job[name], ensure_ascii=False, default=str)
            at_server = text if text != value else None
        sections[section].append(SettingRow(name, value, str(setting["origin"]), at_server))
    return dict(sections)


def server_rows(engine: Json | None) -> list[tuple[str, str]]:
    """Return the settings that the server reports in its status, as pairs (title, value). `engine`
    is the status, or None if the status is unknown."""
    rows: list[tuple[str, str]] = []
    for name, title in _SHOWN_STATUS.items():
        value = None if engine is None else engine.get(name)
        if isinstance(value, bool):
            rows.append((title, "yes" if value else "no"))
        elif value not in (None, "", {}):
            is_text = isinstance(value, str)
            rows.append((title, str(value) if is_text else json.dumps(value, ensure_ascii=False)))
    return rows


def _server_job(url: str, key: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return the server's training job, and the reason if it is unknown."""
    http = HttpDriver(url, key)
    try:
        job = http.run(train_config())
    except (ServerUnreachable, SwarmError) as error:  # translates: the page shows the sentence
        return None, f"The job of the server at {url} is not known: {error.detail}."
    finally:
        http.close()
    if job is None:
        return None, f"The server at {url} has no job, or does not show it to the console's key."
    return job.model_dump(mode="json"), ""


def _explained(message: str, url: str) -> str:
    """Return the reason why the proxy's settings are not known. A proxy of an older version does
    not have the route that returns its settings."""
    if message and "no fakevllm proxy does" not in message:
        return message
    return (
        f"The proxy at {url} does not show its settings: set --url, or update the older one of "
        "proxy and console."
    )
