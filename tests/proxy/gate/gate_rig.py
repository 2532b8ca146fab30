"""A release gate with its server and its held-out rows, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from fakevllm.gate.held_out_evaluation import EvaluationRows, SampledRow
from fakevllm.gate.release_gate import ReleasedArm, ReleaseGate
from fakevllm.ledger.records import EvaluatedRewards
from fakevllm.release.controller import GateController, GateRules
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.errors import bad_request, unavailable
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
)
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, SuccessReply, Task
from tests.proxy.release.simulated_run import SimulatedServer

ROWS = [Task(main_query=f"question {number}", task_id=f"row-{number}") for number in range(5)]
RULES = GateRules(RewardRange(0, 1), num_samples=2, evaluate_every=10, max_samples=400)
DECISIONS_OF_A_RELEASE = [Decision.CANDIDATE, Decision.RELEASED]
PAUSE_S = 0.001
REQUEST = aiohttp.RequestInfo(
    URL("http://server"), "POST", CIMultiDictProxy(CIMultiDict[str]()), URL("http://server")
)


@dataclass
class FakeServer:
    """A server that keeps a history of releases. It can be unreachable, or lose its replies."""

    state: SimulatedServer
    run_id: str = "run"
    is_away: bool = False
    is_silent: bool = False
    """Whether the requests for its status fail."""
    num_lost_replies: int = 0
    num_requests: int = 0
    on_decide: Callable[[], None] = lambda: None

    @property
    def status(self) -> EngineStatusReply | None:
        if self.is_silent:
            return None
        return EngineStatusReply(
            engine_status=EngineStatus.ROLLING,
            run_id=self.run_id,
            weight_version=self.state.newest,
            num_releases=len(self.state.records),
            training_limit=self.state.training_limit,
        )

    @property
    def is_serving(self) -> bool:
        return not self.is_away

    async def releases(self) -> ReleasesReply:
        self._answer()
        return self.state.history()

    async def decide(self, request: ReleaseRequest) -> ReleaseReply:
        self._answer()
        self.on_decide()
        refusal = self.state.decide(request.id, request.decision, request.version)
        if refusal:
            return ReleaseReply(success=False, failure_reason=refusal)
        record = next(one for one in self.state.records if one.id == request.id)
        if self.num_lost_replies:
            self.num_lost_replies -= 1
            raise aiohttp.ServerDisconnectedError
        return ReleaseReply(success=True, record=record)

    async def limit_training(self, version: int | None) -> SuccessReply:
        self._answer()
        self.state.training_limit = version
        return SuccessReply(success=True)

    def _answer(self) -> None:
        self.num_requests += 1
        if self.is_away:
            raise aiohttp.ClientConnectionError("refused")


@dataclass
class GateRig:
    """A gate with its server and its held-out rows. The fields determine and record the behaviour
    of both."""

    server: FakeServer
    rewards: Callable[[int], float | None] = lambda version: float(version > 0)
    """Reward of all samples of a version; None if the hook gives none."""
    evaluated: list[EvaluatedRewards] = field(default_factory=list[EvaluatedRewards])
    """Rows that were sampled."""
    by_eval_id: defaultdict[str, list[EvaluatedRewards]] = field(
        default_factory=lambda: defaultdict(list)
    )
    num_flushed: int = 0
    """Number of rows that are in the ledger's file."""
    num_failed_flushes: int = 0
    """Number of times that the ledger cannot write its rows."""
    num_outages: int = 0
    retry_every_s: float = PAUSE_S
    most_rows: int | None = None
    """Number of sampled rows after which the engine stops answering. None means that it never
    stops."""
    released: list[int] = field(default_factory=list[int])
    unloaded: list[int] = field(default_factory=list[int])
    arm_trouble: str | None = None
    is_arm_loading: bool = False
    hook_hash: str = ""
    scored_by: list[str] = field(default_factory=list[str])
    """Content hashes of the hooks that score the next rows."""
    unusable: str | None = None
    """Reason why the held-out rows measure nothing."""
    is_damaged: bool = False
    """Whether the server refuses to load the candidate."""
    controller: Callable[[GateRules], GateController] = GateController
    served: list[int] = field(default_factory=list[int])
    """Versions that answer the next rows for which the gate names no version, one version per row.
    When the list is empty, the newest version answers."""

    def new_gate(self) -> ReleaseGate:
        return ReleaseGate(
            RULES,
            EvaluationRows(
                ROWS,
                self._sample,
                lambda eval_id, _: list(self.by_eval_id[eval_id]),
                self._unload,
                lambda: self.hook_hash,
                lambda: self.unusable,
                self._flush,
            ),
            self.server,
            ReleasedArm(
                self.released.append, lambda: self.arm_trouble, lambda: self.is_arm_loading
            ),
            controller=self.controller,
            retry_every_s=self.retry_every_s,
            check_every_s=PAUSE_S,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[ReleaseGate]:
        gate = self.new_gate()
        task = asyncio.create_task(gate.run())
        try:
            yield gate
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sample(self, task: Task, version: int | None, eval_id: str) -> SampledRow:
        if version is None:
            version = self.served.pop(0) if self.served else self.server.state.newest
        if self.num_outages:
            self.num_outages -= 1
            raise unavailable("The engine is away.", OutageReason.ENGINE_NOT_READY)
        if self.is_damaged and version == 10:
            raise bad_request("The checkpoint of version 10 is damaged.")
        if self.most_rows is not None and len(self.evaluated) >= self.most_rows:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        hook_hash = self.scored_by.pop(0) if self.scored_by else self.hook_hash
        reward = self.rewards(version)
        rewards = [] if reward is None else [reward] * 2
        row = EvaluatedRewards(version, task.task_id, rewards)
        self.evaluated.append(row)
        self.by_eval_id[eval_id].append(row)
        reason = "hook_raised: KeyError: 'answer'" if reward is None else None
        return SampledRow(rewards, reason, hook_hash, version)

    async def _flush(self) -> bool:
        await asyncio.sleep(0)
        if self.num_failed_flushes:
            self.num_failed_flushes -= 1
            return False
        self.num_flushed = len(self.evaluated)
        return True

    async def _unload(self, version: int) -> None:
        self.unloaded.append(version)

    def num_sampled(self, version: int) -> int:
        return sum(row.version == version for row in self.evaluated)

    @property
    def decisions(self) -> list[Decision]:
        return [record.decision for record in self.server.state.records]
