"""Open the guard of a proxy, which notices when training goes wrong, with its webhook and its
metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator

from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.config.guard import GuardAction, GuardSection
from fakevllm.config.model import Config
from fakevllm.errors import ConfigError
from fakevllm.guard.alert_webhook import SECRET_VARIABLE, AlertWebhook
from fakevllm.guard.detector_bank import GuardRules
from fakevllm.guard.guard_service import Guard, GuardOutlets, GuardSettings
from fakevllm.ledger.store import Ledger
from fakevllm.metrics import Metrics
from fakevllm.runtime.task_set import cancel_task
from fakevllm.swarm.server_connection import SwarmLink


@contextlib.asynccontextmanager
async def open_guard(
    config: Config, ledger: Ledger, link: SwarmLink, kill_switch: KillSwitch, metrics: Metrics
) -> AsyncGenerator[Guard | None]:
    """Run the guard, and the task that sends its alerts, until the block ends. The value is None if
    no detector runs. Raise ConfigError for an action that cannot work."""
    actions = _actions(config)
    if not actions:
        yield None
        return
    section, release = config.guard, config.release
    async with contextlib.AsyncExitStack() as stack:
        webhook = None
        if config.alerts.url is not None:
            webhook = AlertWebhook(config.alerts.url, os.environ.get(SECRET_VARIABLE) or None)
            stack.push_async_callback(webhook.close)
            stack.push_async_callback(cancel_task, asyncio.create_task(webhook.run()))
        guard = Guard(
            GuardSettings(_rules(config, actions), actions, section.second_judge_annotation),
            link,
            ledger.guard,
            GuardOutlets(
                pause_training=None if release.is_gated else lambda: kill_switch.set(True),
                send_alert=webhook.put if webhook is not None else lambda alert: None,
            ),
        )
        stack.push_async_callback(cancel_task, asyncio.create_task(guard.run()))
        _add_gauges(metrics, guard, webhook)
        yield guard


def _actions(config: Config) -> dict[str, GuardAction]:
    """Return the actions of the detectors that run. Without hooks, nothing is trained, and no
    detector runs."""
    section = config.guard
    if config.hooks.path is None:
        _refuse_without_hooks(section)
        return {}
    off = set(section.with_action("off"))
    if section.second_judge_annotation is None:
        off.add("second_judge")
    return {name: action for name, action in section.actions.items() if name not in off}


def _refuse_without_hooks(section: GuardSection) -> None:
    for name in section.with_action("hold", "rollback"):
        raise ConfigError(
            f"guard.{name} needs hooks, because nothing is trained without them: set hooks.path, "
            f'or guard.{name} to "warn".'
        )


def _rules(config: Config, actions: dict[str, GuardAction]) -> GuardRules:
    section, (low, high) = config.guard, config.release.reward_range
    thresholds = section.thresholds.model_dump()
    return GuardRules(
        {name: thresholds[name] for name in actions},
        baseline_steps=section.baseline_steps,
        window_steps=section.window_steps,
        reward_width=high - low,
    )


def _add_gauges(metrics: Metrics, guard: Guard, webhook: AlertWebhook | None) -> None:
    metrics.labelled_gauge(
        "fakevllm_guard_alarms",
        "1 while the alarm of a detector of the guard has not ended, and 0 for the other detectors "
        "that run.",
        "detector",
        lambda: guard.detectors_on,
    )
    metrics.labelled_gauge(
        "fakevllm_alerts",
        "Alarms that were sent to the webhook, could not be sent, or were dropped because too many "
        "waited.",
        "outcome",
        lambda: {} if webhook is None else webhook.counts,
    )
