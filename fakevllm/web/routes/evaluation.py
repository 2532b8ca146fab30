"""The proxy's routes for `fakevllm eval`."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.evaluation.messages import (
    CHECK_PATH,
    END_PATH,
    NO_HOOKS,
    ROW_PATH,
    CheckReply,
    CheckRequest,
    EndReply,
    EndRequest,
    RowReply,
    RowRequest,
    Sample,
)
from fakevllm.groups.evaluator import EvaluatedRow, row_draft
from fakevllm.ledger.records import SiblingRecord
from fakevllm.runtime.disconnect import CancelOnDisconnect
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm.web.routes.passthrough import error_response
from fakevllm.web.trained_rows import trained_rows
from fakevllm_adapters.http.asgi import ClientDisconnected, header_map, read_body
from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, bad_request, schema_error
from fakevllm_adapters.protocol.keys import fingerprint

M = TypeVar("M", bound=BaseModel)


def router(proxy: ProxyComponents) -> APIRouter:
    """Return a router with the proxy's routes that `fakevllm eval` calls."""
    routes = APIRouter()

    @routes.post(CHECK_PATH, response_model=CheckReply)
    async def check(request: Request) -> CheckReply | Response:
        """Reply whether the rows of an evaluation have been trained, and whether its versions can
        be sampled."""
        try:
            rows = await _read(proxy, request, CheckRequest)
            async with CancelOnDisconnect(request.receive):
                return await _check(proxy, rows)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()

    @routes.post(END_PATH, response_model=EndReply)
    async def end(request: Request) -> EndReply | Response:
        """End an evaluation. The engine may then unload the versions."""
        try:
            ended = await _read(proxy, request, EndRequest)
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()
        if (evaluator := proxy.evaluator) is not None:
            for version in ended.versions:
                await evaluator.unload(version)
        return EndReply()

    @routes.post(ROW_PATH, response_model=RowReply)
    async def evaluate(request: Request) -> RowReply | Response:
        """Sample and score one row of an evaluation."""
        try:
            row = await _read(proxy, request, RowRequest)
            async with CancelOnDisconnect(request.receive):
                return await _evaluate(proxy, row, api_key_of(header_map(request.scope)))
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()

    return routes


async def _read(proxy: ProxyComponents, request: Request, model: type[M]) -> M:
    """Return the body of a request. Raises WireError (4xx) if the body is not valid."""
    raw = await read_body(request.receive, proxy.config.limits.body_bytes)
    try:
        return model.model_validate(parse_json(raw))
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None


async def _check(proxy: ProxyComponents, rows: CheckRequest) -> CheckReply:
    """Check whether any of the dataset rows to evaluate was trained. If none was, and the proxy has
    hooks, load the versions of the weights that the evaluation needs."""
    trained = await asyncio.to_thread(trained_rows, proxy.ledger, proxy.tasks, rows.texts)
    if proxy.evaluator is None or trained:
        # The command ends, so no version is needed.
        return CheckReply(has_hooks=proxy.evaluator is not None, trained=trained)
    try:
        await proxy.evaluator.load_all(rows.versions)
    except WireError as error:
        return CheckReply(has_hooks=True, trained=trained, refusal=error.message)
    return CheckReply(has_hooks=True, trained=trained)


async def _evaluate(proxy: ProxyComponents, row: RowRequest, key: str | None) -> RowReply:
    """Sample and score answers to one dataset row, and return them. Raises WireError if the row
    cannot be sampled."""
    if proxy.evaluator is None:
        raise bad_request(NO_HOOKS)
    draft = row_draft(
        row.task,
        proxy.model_names.reported(),
        proxy.link.engine,
        max_tokens=row.max_tokens,
        app_key=fingerprint(key) if key else None,
    )
    return _reply(await proxy.evaluator.evaluate(draft, row.num_samples, row.eval_id, row.version))


def _reply(row: EvaluatedRow) -> RowReply:
    greedy, *samples = [_sample(sibling) for sibling in row.group.siblings]
    return RowReply(
        group_id=row.group.group_id,
        first_version=row.first_version,
        last_version=row.last_version,
        greedy=greedy,
        samples=samples,
        reason=row.reason,
        hook_hash=row.group.hook_hash,
    )


def _sample(sibling: SiblingRecord) -> Sample:
    return Sample(
        text=sibling.text, reward=sibling.reward, failure=sibling.failure or sibling.error
    )
