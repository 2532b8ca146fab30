"""Start the release gate, if the configuration has one."""

from __future__ import annotations

import asyncio
import contextlib

from fakevllm.admission.dataset import read_tasks
from fakevllm.evaluation.messages import trained_text
from fakevllm.gate.held_out_evaluation import EvaluationRows, SampledRow
from fakevllm.gate.release_gate import NO_RELEASED_ARM, ReleasedArm, ReleaseGate
from fakevllm.groups.evaluator import Evaluator, row_draft
from fakevllm.groups.request_arms import RequestArms
from fakevllm.release.arms import Arm
from fakevllm.release.between_steps import BetweenStepsController
from fakevllm.release.controller import GateController, GateRules
from fakevllm.runtime.task_set import cancel_task
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm.web.startup.shared_parts import SharedParts
from fakevllm.web.trained_rows import trained_rows
from fakevllm_adapters.protocol.swarm import Task

PREPARE_S = 3.0
"""When the proxy starts, it waits for up to this many seconds until the server has said which
version is released. A longer wait would not help: without the server, apps get no answers."""


async def open_gate(
    parts: SharedParts,
    evaluator: Evaluator,
    arms: RequestArms | None,
    stack: contextlib.AsyncExitStack,
) -> ReleaseGate:
    """Start the release gate. The gate decides which version of the weights is released. Wait up to
    PREPARE_S seconds until the gate knows the released version."""
    release = parts.config.release
    gate = ReleaseGate(
        GateRules(
            RewardRange(*release.reward_range),
            num_samples=release.eval_samples,
            evaluate_every=release.evaluate_every,
            margin=release.margin,
            alpha=release.alpha,
            max_samples=release.max_samples,
        ),
        _evaluation_rows(parts, evaluator),
        parts.link,
        _released_arm(arms) if release.has_released_arm else NO_RELEASED_ARM,
        pinned=[release.baseline_version] if release.baseline_share else [],
        controller=BetweenStepsController if release.is_between_steps else GateController,
    )
    if arms is not None:
        arms.on_outcome = gate.group_scored
    await gate.prepare(PREPARE_S)
    stack.push_async_callback(cancel_task, asyncio.create_task(gate.run()))
    return gate


def _evaluation_rows(parts: SharedParts, evaluator: Evaluator) -> EvaluationRows:
    """Return the held-out rows, with the functions that sample them and that find rows which were
    trained."""
    config, ledger, release = parts.config, parts.ledger, parts.config.release
    assert release.eval_dataset is not None, "the configuration of a gate names held-out rows"
    file, rows = release.eval_dataset, read_tasks(release.eval_dataset, config.dataset.field)

    async def sample(task: Task, version: int | None, eval_id: str) -> SampledRow:
        draft = row_draft(task, parts.model_names.reported(), parts.link.engine)
        row = await evaluator.evaluate(draft, release.eval_samples, eval_id, version)
        samples = row.group.siblings[1:]  # the first one is greedy
        rewards = [sibling.reward for sibling in samples if sibling.reward is not None]
        return SampledRow(rewards, row.reason, row.group.hook_hash, row.group.eval_version)

    def check_rows() -> str | None:
        texts = [task.main_query for task in rows]
        # Groups that were not sent yet are dropped if they quote a held-out row.
        positions = trained_rows(ledger, parts.tasks, texts, with_unsent=False)
        trained = [texts[position] for position in positions]
        if not trained:
            return None
        advice = "take them out of the file, or name another file, and restart the proxy"
        return f"{trained_text(file, trained)}: {advice}"

    return EvaluationRows(
        rows,
        sample,
        ledger.evaluated_rows,
        evaluator.unload,
        hook_hash=lambda: evaluator.hook_hash,
        check=check_rows,
        flush=ledger.flush,
    )


def _released_arm(arms: RequestArms | None) -> ReleasedArm:
    assert arms is not None, "a proxy whose released version answers sessions has arms"
    policies = arms.policies
    return ReleasedArm(
        set_version=lambda version: policies.set_version(Arm.RELEASED, version),
        trouble=lambda: policies.trouble(Arm.RELEASED),
        is_loading=lambda: policies.is_loading(Arm.RELEASED),
    )
