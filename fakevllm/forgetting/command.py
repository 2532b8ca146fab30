"""The command `fakevllm forget`, which deletes the contents of requests from the ledger, the
proxy's database. If a proxy uses the ledger, the command asks this proxy to delete the contents.
Otherwise the command changes the ledger itself, and then rewrites the ledger's file with VACUUM."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fakevllm.config.key_file import KeyFile
from fakevllm.errors import LedgerError, UserError
from fakevllm.forgetting.forgetter import Forgetter, Forgotten
from fakevllm.forgetting.messages import PATH, ForgetReport, ForgetRequest, TargetMessage
from fakevllm.forgetting.report import report_of
from fakevllm.forgetting.server_requests import REMEDIES, ServerProblem, ServerRequests
from fakevllm.ledger.forgotten_groups import Target, TargetKind
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.offline_copy import copies_of
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.admin_client import fetch_json
from fakevllm.sdk.http_driver import HttpDriver
from fakevllm.sdk.protocol import ServerRequest, fetch
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.swarm import EngineStatusReply
from fakevllm_runtime.erasure import vacuum

M = TypeVar("M", bound=BaseModel)

PROXY_TIMEOUT_S = 900.0
"""Seconds for which the reply of a running proxy is waited for. The proxy waits for groups in
flight and for the server."""
SERVER_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class ForgetSettings:
    """The settings of one `fakevllm forget`: what to forget, and which ledger (the proxy's
    database), key file, proxy and server to use."""

    kind: TargetKind
    value: str
    ledger: Path
    key_file: Path
    proxy_url: str | None
    """URL of the proxy; None if the configuration has no fixed port."""
    proxy_key: str | None
    server_url: str
    server_key: str | None


def run_forget(settings: ForgetSettings) -> ForgetReport:
    """Forget the groups (requests with their answers) of a session, an API key or an id. Return the
    report.

    Raises UserError if the groups cannot be forgotten. The message says what the user can do.
    """
    if not settings.ledger.is_file():
        raise UserError(f"There is no ledger {settings.ledger}: name another with --ledger.")
    lock = _lock(settings.ledger)
    try:
        targets = _targets(settings)
        report = _ask_proxy(settings, targets) if lock is None else _forget_here(settings, targets)
        for copy in copies_of(settings.ledger):
            asyncio.run(_forget_in(copy, targets))
            vacuum(copy)
    except sqlite3.Error as error:
        raise UserError(f"{settings.ledger} cannot be written ({error}): try again.") from None
    finally:
        if lock is not None:
            lock.close()
    return report


def _lock(ledger: Path) -> LedgerLock | None:
    """Return the lock of the ledger (the proxy's database), or None if a proxy holds the lock."""
    try:
        return LedgerLock(ledger)
    except LedgerError as error:
        if "another proxy" in str(error):
            return None
        raise


def _targets(settings: ForgetSettings) -> list[Target]:
    match settings.kind:
        case TargetKind.SESSION:
            values = [_session(settings.ledger, settings.value)]
        case TargetKind.KEY:
            values = _fingerprints(settings.key_file, settings.value)
        case TargetKind.ID:
            values = _ids(settings.ledger, settings.value)
    return [Target(settings.kind, value) for value in values]


def _ids(file: Path, value: str) -> list[str]:
    ledger = Ledger.open(file)
    try:
        return [*ledger.stored_ids(value)]
    finally:
        ledger.close()


def _session(file: Path, prefix: str) -> str:
    ledger = Ledger.open(file)
    try:
        with ledger.reading():
            ids = ledger.sessions.ids_with_prefix(prefix)
    finally:
        ledger.close()
    if not ids:
        raise UserError(f"No session id begins with {prefix!r}: `fakevllm sessions` lists them.")
    if len(ids) > 1 and ids[0] != prefix:
        raise UserError(f"Several session ids begin with {prefix!r}: write more of the id.")
    return ids[0]


def _fingerprints(key_file: Path, value: str) -> list[str]:
    """Return the fingerprints of all API keys whose name is `value`, including revoked keys. If no
    key has this name, assume that `value` is a fingerprint, and return it."""
    entries = KeyFile(key_file).entries() if key_file.exists() else []
    return [key.fingerprint for key in entries if key.name == value] or [value]


def _ask_proxy(settings: ForgetSettings, targets: Sequence[Target]) -> ForgetReport:
    if settings.proxy_url is None:
        raise UserError("A proxy uses the ledger, and its port is not fixed: name its --url.")
    request = ForgetRequest(
        ledger=str(settings.ledger.resolve()),
        targets=[TargetMessage(kind=one.kind, value=one.value) for one in targets],
    )
    reply = fetch_json(
        settings.proxy_url,
        PATH,
        settings.proxy_key,
        method="POST",
        body=request.model_dump(mode="json"),
        timeout_s=PROXY_TIMEOUT_S,
    )
    report = ForgetReport.model_validate(reply)
    if report.refusal:
        raise UserError(report.refusal)
    return report


def _forget_here(settings: ForgetSettings, targets: Sequence[Target]) -> ForgetReport:
    async def forget() -> ForgetReport:
        ledger = Ledger.open(settings.ledger)
        try:
            forgotten = await Forgetter(ledger, wait_s=0.0).forget(targets)
            deleted = await _server_requests(settings, ledger).send_unsent(forgotten.found)
            return await report_of(ledger, forgotten, deleted)
        finally:
            ledger.close()

    report = asyncio.run(forget())
    vacuum(settings.ledger)
    return report


async def _forget_in(copy: Path, targets: Sequence[Target]) -> Forgotten:
    """Forget the targets in `copy`, which another command has copied from the ledger (the proxy's
    database). Send nothing to the server, because the requests to the server are sent only once,
    for the ledger itself."""
    ledger = Ledger.open(copy)
    try:
        return await Forgetter(ledger, wait_s=0.0).forget(targets)
    finally:
        ledger.close()


def _server_requests(settings: ForgetSettings, ledger: Ledger) -> ServerRequests:
    async def send(request: ForgetGroupsRequest) -> ForgetGroupsReply:
        body = request.model_dump(mode="json")
        wanted = ServerRequest("/forget_groups", body, SERVER_TIMEOUT_S)
        return await asyncio.to_thread(run, wanted, ForgetGroupsReply)

    async def find_run() -> str:
        status = ServerRequest("/get_engine_status")
        return (await asyncio.to_thread(run, status, EngineStatusReply)).run_id

    def run(request: ServerRequest, reply: type[M]) -> M:
        http = HttpDriver(settings.server_url, settings.server_key)
        try:
            return http.run(fetch(request, reply))
        except ServerUnreachable as error:  # translated
            where = f"at {settings.server_url} is out of reach ({error.detail})"
            raise ServerProblem(where) from None
        except SwarmError as error:  # translated
            remedy = REMEDIES.get(error.status or 0)
            raise ServerProblem(remedy or f"refused ({error.detail})") from None
        except ValidationError:  # translated
            raise ServerProblem("is no swarm server: set --swarm") from None
        finally:
            http.close()

    return ServerRequests(ledger, send, find_run)
