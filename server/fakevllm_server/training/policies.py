"""Load earlier versions of the weights into the rollout engine, so that the versions can be
sampled. A loaded version is a policy. The engine holds policies beside the served weights.

The weights of a version come from the version's checkpoint. A separate trainer process exports the
checkpoint as a model folder. If the engine takes LoRA adapters, the trainer exports LoRA adapters
instead. Version 0 is the model before training, or LoRA adapters that change nothing.

The engine holds version N under the policy name `policy-N`. This name is never used again for other
weights. After a restart, the engine has no policies, and the next request for a version loads the
version again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fakevllm_adapters.protocol.policy_names import policy_name
from fakevllm_server.backends.http.policies import MAX_POLICIES
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.verl.trainer_arguments import (
    ADAPTERS_FOLDER,
    arguments_for_checkpoint,
)
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.releases import MAX_ANSWERING
from fakevllm_server.types.backend import Backend, Endpoint, Trainer
from fakevllm_server.types.engine_spec import EngineSpec

log = logging.getLogger("fakevllm.server")

IN_USE_S = 600.0
"""Seconds for which a version stays loaded after the last request for it, even if another version
needs room. An evaluation requests its versions again before each row of its data."""


MAX_PINNED = MAX_ANSWERING
"""Maximum number of policies that answer apps."""
MAX_UNPINNED = MAX_POLICIES - MAX_PINNED
"""Maximum number of policies that only evaluations need."""
PINNED_S = 600.0
"""Seconds for which a pinned version is kept after the last request to pin it. A proxy repeats the
request every minute. If the proxy is gone, the version is therefore not kept for ever."""
STALE_PIN_S = 120.0
"""If the last request to pin a version is older than this number of seconds, another version may
take its place. This is twice the interval at which a proxy repeats the request."""


class PolicyRefused(Exception):
    """Error for a version of the weights that cannot be sampled. The message contains the reason,
    and the versions that can be sampled. `is_temporary` is True if the engine holds as many
    versions as it can, and all of them are in use. The version can then be sampled as soon as other
    evaluations have ended."""

    def __init__(self, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class PolicyLoader:
    """Loads and unloads policies: versions of the weights that the engine holds beside the served
    weights. Requests are handled one after another."""

    def __init__(
        self,
        backend: Backend,
        trainer: EngineSpec,
        folders: CheckpointFolders,
        journal: Journal,
        served_version: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        rejected: Callable[[], Collection[int]] = frozenset,
        on_pin: Callable[[int, bool], None] = lambda version, is_pinned: None,
    ) -> None:
        """Create the loader. `trainer` is the specification of the backend's trainer.
        `served_version` returns the version that the engine serves. `rejected` returns the versions
        that must not be sampled any longer.

        `on_pin` is called with a version and True after the version was pinned. A pinned version
        answers apps, and must stay loaded. `on_pin` is called with the version and False when the
        version is no longer pinned.
        """
        self._on_pin = on_pin
        self._rejected = rejected
        self._clock = clock
        self._backend = backend
        self._trainer = trainer
        self._folders = folders
        self._journal = journal
        self._served_version = served_version
        self._lock = asyncio.Lock()
        self._requested_at: dict[str, float] = {}
        """When each policy was last requested, by its name."""
        self._pinned_at: dict[str, float] = {}
        """When each policy was last pinned, by its name."""

    async def load(self, version: int, endpoint: Endpoint, *, pinned: bool = False) -> str:
        """Load a version of the weights into the engine as a policy, if the engine does not hold it
        yet. Return the model name to use in calls that this version is to answer. Raise
        PolicyRefused if the version cannot be sampled, or if all policies are in use. Raise
        BackendError if an engine fails.

        If the engine holds the maximum number of policies, the policy whose last request is the
        oldest is unloaded. A policy that was requested within IN_USE_S is not unloaded.

        The engine may be unable to hold the served version as a policy. The result is then the
        served model's name. In this case, a request with `pinned=True` is refused, because training
        would replace the weights.

        A pinned policy answers apps. The pin lasts for PINNED_S, also if the policy is unloaded. At
        most MAX_PINNED policies can be pinned. If a further policy is to be pinned, a policy whose
        pin is older than STALE_PIN_S is unloaded.
        """
        name = policy_name(version)
        await self._check_rejected(version, endpoint)  # it does not wait until others are loaded
        if pinned and self._is_pinned(name):  # nor is its pin stale for that wait
            self._pinned_at[name] = self._clock()
        async with self._lock:
            await self._check_rejected(version, endpoint)
            loaded = await self._backend.rollout.policies() if endpoint.holds_policies else {}
            held = self._held(loaded)
            if pinned:
                await self._make_pin_room(name, held)
            if name not in loaded:
                checkpoint = self._checkpoint_of(version)
                is_kept = checkpoint is not None or version == 0
                can_hold = is_kept and endpoint.holds_policies
                if version == self._served_version() and not can_hold and not pinned:
                    return endpoint.model_name
                if not endpoint.holds_policies:
                    raise PolicyRefused(
                        "The engine holds one set of weights, so only the version that it serves, "
                        f"{self._served_version()}, can be sampled. vLLM holds several versions if "
                        "the server starts it with --engine-arg=--enable-lora for a job with "
                        "lora_rank."
                    )
                if not is_kept:
                    raise PolicyRefused(self._unknown(version))
                await self._make_room([one for one in held if one != name], pinned=pinned)
                await self._load(name, version, checkpoint, endpoint.takes_adapters)
            self._requested_at[name] = self._clock()
            if pinned:
                self._pinned_at[name] = self._clock()
                self._on_pin(version, True)
            return name

    async def unload(self, version: int, *, pinned: bool = False) -> None:
        """Unload the policy of a version, if the policy is loaded. (A policy is a version that the
        engine holds beside the served weights.) A pinned policy answers apps, and is unloaded only
        if `pinned=True` is passed. This argument removes the pin."""
        async with self._lock:
            name = policy_name(version)
            if pinned:
                self._pinned_at.pop(name, None)
                self._on_pin(version, False)
            if not self._is_pinned(name):
                await self._backend.rollout.unload_policy(name)

    async def _check_rejected(self, version: int, endpoint: Endpoint) -> None:
        """If the version of the weights was rejected by a decision, unload the version, and raise
        PolicyRefused."""
        if version not in self._rejected():
            return
        self._pinned_at.pop(policy_name(version), None)
        self._on_pin(version, False)
        if endpoint.holds_policies:
            await self._backend.rollout.unload_policy(policy_name(version))
        raise PolicyRefused(
            f"Version {version} was rejected, so it is not sampled any more: name another version."
        )

    def _checkpoint_of(self, version: int) -> SavedCheckpoint | None:
        known = self._journal.read(reads.checkpoints) + self._journal.read(reads.side_checkpoints)
        return next((saved for saved in known if saved.version == version), None)

    def _unknown(self, version: int) -> str:
        saved = [str(one.version) for one in self._journal.read(reads.checkpoints)]
        known = ", ".join(["0", *reversed(saved)])
        if version > self._served_version():
            cause = f"does not exist: the newest is {self._served_version()}"
        else:
            cause = "has no checkpoint (any more)"
        return f"Version {version} {cause}. These versions can be sampled: {known}."

    def _is_pinned(self, name: str) -> bool:
        return self._clock() - self._pinned_at.get(name, -math.inf) < PINNED_S

    def _held(self, loaded: Iterable[str]) -> list[str]:
        """Return the names of the policies that need room. `loaded` are those that the engine
        holds. In a fleet, they are those that all replicas hold, but a replica can also be full of
        policies that a restarted replica lacks."""
        rollout = self._backend.rollout
        return sorted(rollout.held_policies) if isinstance(rollout, FleetRollout) else [*loaded]

    async def _make_pin_room(self, name: str, held: list[str]) -> None:
        pinned = [one for one in held if self._is_pinned(one)]
        if len(pinned) < MAX_PINNED or name in pinned:
            return
        oldest = min(pinned, key=lambda one: self._pinned_at[one])
        if self._clock() - self._pinned_at[oldest] < STALE_PIN_S:
            raise PolicyRefused(
                f"{len(pinned)} versions answer apps ({', '.join(pinned)}), which is the maximum."
            )
        del self._pinned_at[oldest]
        held.remove(oldest)
        await self._backend.rollout.unload_policy(oldest)

    async def _make_room(self, held: Iterable[str], *, pinned: bool) -> None:
        removable = [name for name in held if not self._is_pinned(name)]
        removable.sort(key=self._last_request)
        while len(removable) > MAX_UNPINNED - (not pinned):
            if self._clock() - self._last_request(removable[0]) < IN_USE_S:
                names = ", ".join(removable)
                raise PolicyRefused(
                    f"The engine holds {len(removable)} versions beside the served weights, which "
                    f"is the maximum, and all of them are in use ({names}): wait until "
                    "the other evaluations have ended, or compare fewer versions.",
                    is_temporary=True,
                )
            await self._backend.rollout.unload_policy(removable.pop(0))

    def _last_request(self, name: str) -> float:
        return self._requested_at.get(name, -math.inf)

    async def _load(
        self, name: str, version: int, checkpoint: SavedCheckpoint | None, as_adapters: bool
    ) -> None:
        log.info("loading version %d as %s", version, name)
        source = None
        if checkpoint is not None:
            try:
                source = await asyncio.to_thread(self._folders.find, checkpoint)
            except OSError as error:
                raise PolicyRefused(
                    f"The checkpoint of version {version} is gone: {error}."
                ) from None
        elif (
            not as_adapters
            and self._trainer.model is not None
            and Path(self._trainer.model).is_dir()
        ):
            return await self._backend.rollout.load_policy(name, Path(self._trainer.model), version)
        folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="fakevllm-policy-")
        try:
            model = Path(folder.name).resolve() / "model"
            if as_adapters:
                await self._export_adapters(source, model)
            else:
                await self._export(source, model)
            await self._backend.rollout.load_policy(name, model, version)
        finally:
            await asyncio.to_thread(folder.cleanup)

    async def _export(self, checkpoint: Path | None, to: Path) -> None:
        """Write the weights of a checkpoint to a model folder. Without a checkpoint, write the
        weights of the model itself."""
        async with self._separate_trainer(checkpoint) as trainer:
            await trainer.export(to)

    async def _export_adapters(self, checkpoint: Path | None, to: Path) -> None:
        """Write the LoRA adapters of a checkpoint to a folder. Without a checkpoint, write LoRA
        adapters that change nothing."""
        if checkpoint is None:
            return await self._backend.trainer.export_adapters(to, "reference")
        if (checkpoint / ADAPTERS_FOLDER).is_dir():
            await asyncio.to_thread(shutil.copytree, checkpoint / ADAPTERS_FOLDER, to)
            return None
        async with self._separate_trainer(checkpoint) as trainer:
            await trainer.export_adapters(to, "trained")

    @asynccontextmanager
    async def _separate_trainer(self, checkpoint: Path | None) -> AsyncGenerator[Trainer]:
        """Start a separate trainer with the weights of a checkpoint. Without a checkpoint, the
        trainer has the weights of the model itself. Close the trainer when the block ends."""
        with tempfile.TemporaryDirectory(prefix="fakevllm-") as run_dir:
            # The trainer of the run keeps its weights and its memory: the export has its own.
            arguments = _export_arguments(self._trainer.engine, checkpoint)
            spec = replace(
                self._trainer, run_dir=Path(run_dir), extra_args=arguments, train_only=True
            )
            trainer = ChildEngine(spec)
            try:
                await trainer.launch()
                if checkpoint is not None:
                    await trainer.restore(checkpoint.resolve())
                yield trainer
            finally:
                await trainer.close()


def _export_arguments(trainer: str, checkpoint: Path | None) -> list[str]:
    """Return the command-line arguments of a separate trainer that only exports a checkpoint. The
    value None stands for the weights of the model itself."""
    if trainer == "embedded":
        return ["--device=cpu"]
    if trainer == "verl" and checkpoint is not None:
        return arguments_for_checkpoint(checkpoint)
    return []
