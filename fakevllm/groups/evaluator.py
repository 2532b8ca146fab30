"""Evaluation of one held-out dataset row: sample the row, score the samples, and record them. These
samples are never trained. The model calls for these samples lack the header that marks calls for
training, so the server does not keep the tokens of these calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from fakevllm.admission.row_requests import request_of
from fakevllm.gate.held_out_evaluation import at_once
from fakevllm.gate.loaded_versions import LoadedVersions
from fakevllm.groups.group_record import GroupDraft, failure_reason_of
from fakevllm.groups.scoring import score
from fakevllm.hooks.hook_versions import HookVersions
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm.swarm.server_client import LOAD_TIMEOUT_S
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient
from fakevllm.transport.request import Request, SiblingResult, read_answer
from fakevllm.transport.retry_handler import AttemptContext, RetryHandler
from fakevllm.transport.retry_policy import RetrySchedule
from fakevllm_adapters.formats.base import EngineInfo, Json
from fakevllm_adapters.formats.chat import NEUTRAL_SAMPLING
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.errors import WireError, bad_request, unavailable
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.swarm import Task

log = logging.getLogger("fakevllm.groups.evaluator")

_SAMPLING: Json = NEUTRAL_SAMPLING | {"temperature": 1.0}
"""Sampling parameters of all samples except the greedy sample. With these parameters, the samples
are drawn from the model's whole distribution, like the answers that are sampled for training. The
parameters depend neither on the model's generation_config.json nor on the training job. Therefore
evaluations under different jobs can be compared."""
_GREEDY: Json = {"temperature": 0.0}
_HEADERS = {"Content-Type": "application/json"}
MAX_BUSY_S = 60.0
"""Seconds for which a sample is retried after the engine has refused it because of overload. After
this time, the proxy refuses the whole row, and the command `fakevllm eval` repeats the row."""
_CHECK_IDLE_EVERY_S = 30.0
_OLD_SERVER = "The server does not know policies: update fakevllm-server, or leave --version out."
_NOT_SERVED = (
    "Version {version} is not served any more and has no checkpoint: pause training with "
    "`fakevllm pause`, or name a version that has a checkpoint."
)
_UNKNOWN = "The server has not reported which version it serves."
_LOST = "The engine does not hold version {version} any more."


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The samples of one dataset row, before they are scored."""

    results: Sequence[SiblingResult]
    first_version: int | None
    last_version: int | None


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """The result of the evaluation of one held-out dataset row."""

    group: GroupRecord
    """The ledger record of the row with its samples. Sibling 0 is the greedy sample."""
    first_version: int | None
    """Version of the weights before the first sample, as the server reported it; None if it is
    unknown."""
    last_version: int | None
    """Version of the weights after the last sample; None if it is unknown."""
    reason: str | None
    """Reason why no sample has a reward; None if at least one sample has a reward."""


def row_draft(
    task: Task,
    model: str,
    engine: EngineInfo,
    *,
    max_tokens: int | None = None,
    app_key: str | None = None,
) -> GroupDraft:
    """Return a new GroupDraft for the row `task`, which is to be evaluated. `model` is the served
    model's name. `app_key` is the fingerprint of the API key of the evaluation request."""
    body: Json = {"model": model, **request_of(task)}
    if max_tokens is not None:
        body.pop("max_completion_tokens", None)  # it would take precedence over `max_tokens`
        body["max_tokens"] = max_tokens
    raw = orjson.dumps(body)
    adapter = ADAPTERS["chat"]
    exchange = adapter.open(body, engine, None)
    request = Request(new_id(), adapter, raw, raw, exchange, _HEADERS, model=model)
    return GroupDraft(request, task, task.main_query, app_key, received_at=time.time())


class Evaluator:
    """The part of the proxy that samples and scores held-out dataset rows."""

    def __init__(
        self,
        upstream: EngineClient,
        retry_handler: RetryHandler,
        hooks: HookVersions,
        ledger: Ledger,
        link: SwarmLink,
        failure_floor: float | None = None,
    ) -> None:
        self._upstream = upstream
        self._retry_handler = retry_handler
        self._hooks = hooks
        self._ledger = ledger
        self._link = link
        self._failure_floor = failure_floor
        self._loaded = LoadedVersions()

    @property
    def hook_hash(self) -> str:
        """Content hash of the hooks that score the samples."""
        return self._hooks.info.content_hash

    async def run(self) -> None:
        """Regularly unload the versions of the weights that no evaluation uses any more, until this
        task is cancelled. A killed `fakevllm eval` does not report its end, so its versions would
        otherwise stay loaded."""
        while True:
            await asyncio.sleep(_CHECK_IDLE_EVERY_S)
            await self.unload_idle(time.monotonic())

    async def unload_idle(self, now_s: float) -> None:
        """Unload the versions of the weights that no evaluation has used for a long time. `now_s`
        is the current time on a monotonic clock."""
        for version in self._loaded.take_idle(now_s):
            log.info("unloading version %d, which no evaluation uses any more", version)
            await self._link.unload_policy(version)

    async def load_all(self, versions: Sequence[int]) -> None:
        """Let the server load the versions of the weights that an evaluation needs. Raises
        WireError if a version cannot be loaded."""
        with self._using(versions):
            for version in versions:
                await self.load(version)

    async def load(self, version: int) -> str:
        """Let the server load a version of the weights. Return the model name that selects this
        version in a model call. Raises WireError if the server refuses the request or cannot be
        reached."""
        try:
            reply = await self._link.load_policy(version)
        except NETWORK_ERRORS as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status in (404, 405):
                raise bad_request(_OLD_SERVER) from None
            raise unavailable(f"The server {describe_error(error, LOAD_TIMEOUT_S)}.") from None
        if reply.is_temporary:
            raise unavailable(reply.failure_reason, OutageReason.ENGINE_BUSY)
        if not reply.success:
            raise bad_request(reply.failure_reason)
        return reply.model

    async def unload(self, version: int) -> None:
        """Tell the server that no evaluation needs this version of the weights any more."""
        self._loaded.forget(version)
        await self._link.unload_policy(version)

    async def evaluate(
        self, draft: GroupDraft, num_samples: int, eval_id: str, version: int | None = None
    ) -> EvaluatedRow:
        """Sample, score and store the dataset row of `draft`.

        The row is sampled once greedily, and `num_samples` times at temperature 1. The weights are
        those of `version`, or the served weights if `version` is None. One call of the reward hook
        scores all samples. Then the samples are stored in the ledger (the proxy's database).

        A sample that the engine refuses gets no reward. If the engine is unavailable, the samples
        wait until the engine is available, as an app's request does. Raises WireError if the engine
        stays unavailable, or if the version cannot be sampled. After a WireError, nothing is
        stored, and the row can be evaluated again.
        """
        draft.num_siblings = num_samples + 1
        with self._using([] if version is None else [version]):
            sampled = await self._sampled(draft, version)
            if sampled is None:
                sampled = await self._sampled_again(draft, version)
        results, first, last = sampled.results, sampled.first_version, sampled.last_version
        answered = [result for result in results if result.answer is not None]
        if answered:
            with self._hooks.using(draft.request.id, Use.CALL) as hooks:
                outcome = await score(hooks, draft, answered, self._failure_floor)
        else:
            outcome = RewardOutcome(None, failure_reason_of(results[0]))
        single = first if first == last else None
        status = self._link.status
        group = replace(
            draft.evaluated(results, answered, outcome, eval_id, single),
            run_id=None if status is None else status.run_id or None,
        )
        self._ledger.record(group)
        has_rewards = any(sibling.reward is not None for sibling in group.siblings)
        reason = None if has_rewards else outcome.reason or "the hook gave no reward"
        if not answered:
            reason = f"{reason}: {group.siblings[0].error}"
        return EvaluatedRow(group, first, last, reason)

    @contextlib.contextmanager
    def _using(self, versions: Sequence[int]) -> Generator[None]:
        """Mark these versions as used while the `with` block runs, so that they are not unloaded as
        idle."""
        self._loaded.begin(versions)
        try:
            yield
        finally:
            self._loaded.end(versions, time.monotonic())

    async def _sampled(self, draft: GroupDraft, version: int | None) -> _Sampled | None:
        """Sample the dataset row of `draft`, and return the samples. Return None if `version` is
        not None and the server replaced this version while the row was sampled. Raises WireError if
        the engine stays unavailable, or if the version cannot be sampled."""
        served = str(draft.request.body["model"])
        model = served if version is None else await self.load(version)
        first = await self._version()
        results = await self._samples(draft, model, version)
        last = await self._version()
        if version is None:
            return _Sampled(results, first, last)
        if model == served:
            if first is None or last is None:
                raise unavailable(_UNKNOWN, OutageReason.SERVER_UNREACHABLE)
            if (first, last) != (version, version):
                return None
        return _Sampled(results, version, version)

    async def _sampled_again(self, draft: GroupDraft, version: int | None) -> _Sampled:
        """Sample a row once more, because new weights replaced the requested version during the
        first attempt. In this second attempt, the server loads the version from its checkpoint. If
        the version has no checkpoint, raises WireError (400). The error message says what the user
        can do."""
        try:
            sampled = await self._sampled(draft, version)
        except WireError as error:  # translates the server's refusal
            if error.status != 400:
                raise
            sampled = None
        if sampled is None:
            raise bad_request(_NOT_SERVED.format(version=version))
        return sampled

    async def _version(self) -> int | None:
        status = await self._link.fetch_status()
        return None if status is None else status.weight_version

    async def _samples(
        self, draft: GroupDraft, model: str, version: int | None
    ) -> list[SiblingResult]:
        """Return the samples of a dataset row. If one sample raises WireError, cancel the other
        samples and raise this error."""
        return await at_once(
            self._sample(draft.request, model, index, version)
            for index in range(draft.num_siblings)
        )

    async def _sample(
        self, request: Request, model: str, index: int, version: int | None
    ) -> SiblingResult:
        """Return one sample, or the error with which the engine refused the content of the request.
        Raises WireError for an outage.

        If the engine is busy, retry after a backoff. The retry does not use the queue in which
        apps' requests wait for a busy engine. While a request waits in that queue, the proxy
        samples every app's request only once. An evaluation must not have this effect.
        """
        schedule: RetrySchedule | None = None
        while True:
            result = await self._attempt(request, model, index, version)
            error = result.upstream_error
            if error is None or not result.is_busy:
                return result
            now_s = time.monotonic()
            schedule = schedule or RetrySchedule(MAX_BUSY_S, now_s)
            pause_s = schedule.pause(OutageReason.ENGINE_BUSY, now_s)
            if pause_s is None:
                raise error
            await asyncio.sleep(pause_s)

    async def _attempt(
        self, request: Request, model: str, index: int, version: int | None
    ) -> SiblingResult:
        """Send one sample's call to the engine once. Return the sample, or the error with which the
        engine refused the call. Raises WireError for an outage."""
        sampling = _SAMPLING if index > 0 else _GREEDY
        sibling_limit = self._retry_handler.sibling_limit

        async def attempt(request: Request, _: AttemptContext) -> SiblingResult:
            body = orjson.dumps(request.body | sampling | {"model": model})
            path = request.adapter.upstream_path
            with sibling_limit.sampling():
                reply = await self._upstream.call(path, body, request.headers)
                if reply.status == 404 and version is not None:
                    # The engine was started again after the version was loaded.
                    await self.load(version)
                    reply = await self._upstream.call(path, body, request.headers)
                    if reply.status == 404:
                        raise unavailable(
                            _LOST.format(version=version), OutageReason.ENGINE_NOT_READY
                        )
            result = SiblingResult(index, reply, read_answer(request, reply))
            if (error := result.outage) is not None and not result.is_busy:
                raise error
            return result

        app = AppResponse(_send_nothing, request.adapter, None)
        return await self._retry_handler.retry_until_answered(request, app, attempt, is_lead=False)


async def _send_nothing(_: MutableMapping[str, Any]) -> None:
    """Do nothing. This function takes the place of the app's connection, because an evaluated
    dataset row has no app."""
