"""A proxy with feedback in front of a stub of the swarm server, and groups to send feedback
about."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakevllm.config.model import load
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.settlement.feedback_service import FeedbackService
from fakevllm.settlement.feedback_to_reward import FeedbackBody
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm_adapters.protocol.swarm import EndGroupReply
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.proxy.ledger.ledger_cases import call, group
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until

KEY = "0a1b2c3d"
POOLED = EndGroupReply(success=True, pooled=True, step=3)


@asynccontextmanager
async def open_feedback_proxy(
    folder: Path,
    *,
    status: object = None,
    hooks: str = "",
    eval_dataset: Path | None = None,
    redact: Sequence[str] = (),
    **settings: Any,
) -> AsyncGenerator[tuple[ProxyComponents, FeedbackService, ScriptedSwarm]]:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/add_sample"] = POOLED
        swarm.answers["/get_engine_status"] = status or ROLLING
        flags: dict[str, Any] = {
            "proxy": {"run_dir": folder},
            "swarm": {"url": swarm.url},
            "feedback": {"num_for_baseline": 2} | settings,
            "privacy": {"redact": list(redact)},
        }
        if eval_dataset is not None:
            flags["release"] = {"eval_dataset": eval_dataset}
        if hooks:
            flags["hooks"] = {"path": write_hooks(folder / "hooks", PREFER_YES)}
            (folder / "hooks/on_feedback.py").write_text(hooks)
        async with open_proxy(load(None, flags)) as proxy:
            yield proxy, proxy.feedback, swarm


def record_pooled(proxy: ProxyComponents, *names: str, run_id: str = "r") -> None:
    """Record groups with their calls, as the server's reply contains them."""
    for name in names:
        proxy.ledger.record(group(name, [0.5, 1.0]))
        proxy.ledger.settle(name, "pooled", None, 1, [[call()], [call()]], run_id)


def feedback_on(name: str, **content: Any) -> FeedbackBody:
    return FeedbackBody.model_validate({"id": name} | (content or {"thumbs": "up"}))


def rows(proxy: ProxyComponents) -> list[FeedbackRecord]:
    assert proxy.ledger.drain()
    names = ("g1", "g2", "g3")
    return [row for name in names for row in proxy.ledger.feedback.of_group(name)]


async def until_states(proxy: ProxyComponents, *states: str) -> list[FeedbackRecord]:
    await until(lambda: [row.state for row in rows(proxy)] == [*states])
    return rows(proxy)
