"""Run the hook files on disk over the latest logged groups, as the proxy does before it uses edited
hooks. Nothing is stored, and the proxy does not notice the trial.

The hooks run in a process of their own, which is killed when a hook exceeds its time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from fakevllm.admission.dataset import tasks_by_id
from fakevllm.config.hook_reload import ReloadSection
from fakevllm.config.model import Config
from fakevllm.errors import UserError
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.loader import first_line
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.ledger.broken_rows import READ_ERRORS
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.rescoring.change_lines import change_lines
from fakevllm.rescoring.comparison import RescoredGroup
from fakevllm.rescoring.hook_trial import HookTrial, Trial
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings

MAX_SHOWN = 50
"""Maximum number of groups whose rewards are shown. Groups with other rewards come first."""


@dataclass(frozen=True, slots=True)
class DryRunSettings:
    """The hook files, and the settings with which the proxy runs and tries them."""

    hooks: Path
    """The folder of the hook files, or one file."""
    timeout_s: float = 30.0
    sandbox: HookSandbox = DEFAULT_SANDBOX
    limits: ReloadSection = field(default_factory=ReloadSection)
    failure_floor: float | None = None
    dataset: Path | None = None
    dataset_field: str = "question"
    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @staticmethod
    def of(config: Config) -> DryRunSettings | None:
        """Return the settings from `config`, or None if `config` names no hooks."""
        hooks = config.hooks
        if hooks.path is None:
            return None
        return DryRunSettings(
            hooks.path,
            hooks.timeout_s,
            HookSandbox(hooks.environment, hooks.memory_mb),
            hooks.reload,
            config.reward.failure_floor,
            config.dataset.file,
            config.dataset.field,
            config.job.privacy_or_default,
        )

    @property
    def trial_limits(self) -> ReloadSection:
        """The limits of the dry run. If the configured number of groups is 0 (the proxy tries no
        new hooks), the dry run uses the default number of groups."""
        num = self.limits.groups or ReloadSection().groups
        return self.limits.model_copy(update={"groups": num})


@dataclass(frozen=True, slots=True)
class TriedGroup:
    """A group on which the hooks were run, with the beginning of its question."""

    question: str
    rewards: RescoredGroup

    @property
    def pairs(self) -> list[tuple[float | None, float | None]]:
        """The old and the new reward of each answer."""
        new = self.rewards.new or [None] * len(self.rewards.old)
        return list(zip(self.rewards.old, new, strict=True))

    @property
    def is_changed(self) -> bool:
        return any(old != new for old, new in self.pairs)


@dataclass(slots=True)
class DryRun:
    """One dry run, with its results so far."""

    trial: Trial = field(default_factory=Trial)
    digest: str = ""
    """Digest of the files that were tried."""
    is_running: bool = True
    problem: str = ""
    """Why the proxy would refuse the hooks, or why they could not be tried. Empty if neither."""
    groups: list[TriedGroup] = field(default_factory=list[TriedGroup])
    """The groups that are shown, when the dry run has ended."""
    means: tuple[float, float] | None = None
    """The mean of the old and of the new rewards, over the answers that have both. None before the
    dry run has ended, and if no answer has both."""
    changes: list[str] = field(default_factory=list[str])
    """Lines that compare the new rewards with the old ones, when the dry run has ended."""

    @property
    def num_tried(self) -> int:
        return self.trial.comparison.num_groups


def mean_rewards(results: Iterable[RescoredGroup]) -> tuple[float, float] | None:
    """Return the mean of the old and of the new rewards, over the answers that have both. Return
    None if there is no such answer."""
    pairs = [
        (old, new)
        for one in results
        for old, new in TriedGroup("", one).pairs
        if old is not None and new is not None
    ]
    if not pairs:
        return None
    olds, news = zip(*pairs, strict=True)
    return fmean(olds), fmean(news)


class HookDryRuns:
    """The dry runs of one console. One dry run takes place at a time, and the result of the last
    one is kept."""

    def __init__(self, settings: DryRunSettings | None, ledger: ReadOnlyLedger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._task: asyncio.Task[None] | None = None
        self.last: DryRun | None = None

    def start(self) -> None:
        """Begin a dry run, unless one is running. The method needs a running event loop."""
        if self._settings is None or (self._task is not None and not self._task.done()):
            return
        self.last = DryRun()
        self._task = asyncio.create_task(self._run(self._settings, self.last))

    async def _run(self, settings: DryRunSettings, run: DryRun) -> None:
        try:
            problem = await self._try(settings, run)
            run.groups = await asyncio.to_thread(self._shown, run.trial.results)
            run.means = mean_rewards(run.trial.results)
        except UserError as error:  # translates: the page shows the sentence
            problem = str(error)
        except Exception as error:  # isolates: whatever fails in a dry run is shown
            problem = f"the dry run failed with {first_line(error)}"
        comparison = run.trial.comparison
        run.trial.results.clear()  # they have whole answers
        run.problem = problem.rstrip(".")
        run.changes = change_lines(comparison) if comparison.num_compared else []
        run.is_running = False

    async def _try(self, settings: DryRunSettings, run: DryRun) -> str:
        """Run the hooks over the groups. Return the reason why the proxy would refuse the hooks, or
        an empty text."""
        limits = settings.trial_limits
        tasks = await asyncio.to_thread(tasks_by_id, settings.dataset, settings.dataset_field)
        await asyncio.to_thread(self._check_ledger)
        groups = self._ledger.recorded_groups
        find_task = partial(groups.task, rows=tasks)
        trial = HookTrial(groups, self._ledger.file, find_task, limits, settings.failure_floor)
        redaction = RedactionInUse(settings.privacy)
        worker = HookWorker(
            settings.hooks, settings.timeout_s, settings.sandbox, redaction=redaction
        )
        try:
            async with asyncio.timeout(limits.max_s):
                run.digest = await worker.read_files()
                await worker.start()
                return await trial.run(worker, run.trial) or ""
        except TimeoutError:
            num = f"{run.num_tried} of {run.trial.num_groups} groups were tried"
            return f"only {num} within {limits.max_s:g} s (limit hooks.reload.max_s)"
        finally:
            await worker.close()

    def _check_ledger(self) -> None:
        with self._ledger.reading():
            pass

    def _shown(self, results: list[RescoredGroup]) -> list[TriedGroup]:
        tried = [TriedGroup("", one) for one in results]
        tried.sort(key=lambda one: not one.is_changed)
        return [self._with_question(one.rewards) for one in tried[:MAX_SHOWN]]

    def _with_question(self, rewards: RescoredGroup) -> TriedGroup:
        try:
            group = self._ledger.groups.group(rewards.group_id)
        except READ_ERRORS:  # isolates: the rewards are shown without the question
            group = None
        return TriedGroup("" if group is None else group.question, rewards)
