"""Manage the LoRA adapters of a vLLM with `--enable-lora`. vLLM holds one adapter for each version
of the weights.

Calls select an adapter by its name, `policy-N` for version N. The served weights are also an
adapter, even at version 0, where the adapter changes nothing. The reason is that a vLLM on a CPU,
once it holds adapters, computes calls without an adapter wrongly.

Four rules follow from how vLLM works:

* A name is never used again for other weights, because vLLM's prefix cache identifies an adapter by
  its name.
* An adapter's files are kept as long as a call may use the adapter. vLLM may read the files again
  at any time, and dies if the files are gone.
* The served weights change without a pause. A running call keeps the adapter with which it began
  until the call ends.
* vLLM's own weights are never replaced, because vLLM could not answer calls afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fakevllm_adapters.protocol.policy_names import policy_name
from fakevllm_server.backends.http.policies import PolicyNames
from fakevllm_server.backends.vllm.command import MERGED_INSTEAD
from fakevllm_server.backends.vllm.control_client import RELOAD_TIMEOUT_S, ControlClient
from fakevllm_server.backends.vllm.response import VllmResponse, parse_object
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused
from fakevllm_server.types.weight_versions import CallStamp, WeightGate

log = logging.getLogger("fakevllm.server")

FOLDER_NAME = "engine-adapters"
"""Folder in the run directory with the files of the loaded adapters. The folder is deleted when
vLLM has ended, and before the next vLLM is started."""
CONFIG_FILE = "adapter_config.json"
_ALREADY_LOADED = "has already been loaded"


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A LoRA adapter that is no longer needed, but that running calls may still use."""

    name: str
    folder: Path
    calls: frozenset[CallStamp]
    """The calls that ran when the adapter was last needed. The adapter's files are kept until these
    calls have ended."""


class Adapters:
    """The LoRA adapters that one running vLLM holds. Only one change is made at a time."""

    def __init__(
        self,
        client: ControlClient,
        gate: WeightGate,
        run_dir: Path,
        model_name: str,
        max_rank: int,
        *,
        were_held: bool = False,
        drain_bound_s: float | None = None,
    ) -> None:
        """Create the object for a vLLM that holds no LoRA adapter yet. `model_name` is the name of
        vLLM's model. `max_rank` is the highest adapter rank that vLLM accepts. `were_held` is True
        if an earlier vLLM process with the same arguments has held an adapter. `drain_bound_s` is
        the maximum number of seconds that new served weights wait for running calls, or None if
        they do not wait."""
        self._client = client
        self._gate = gate
        self._max_rank = max_rank
        self._were_held = were_held
        self._drain_bound_s = drain_bound_s
        self._root = adapter_root(run_dir)
        self._lock = asyncio.Lock()
        self._numbers = count()
        self._loaded: dict[str, Path] = {}
        """Maps the name of each adapter that vLLM knows to the folder of the adapter."""
        self._leaving: list[_Leaving] = []
        self.names = PolicyNames(model_name)
        """The loaded policies, which are versions that vLLM holds beside the served weights."""

    async def serve(self, folder: Path, version: int) -> None:
        """Serve the LoRA adapter in `folder` as version `version` from now on. If the adapter
        cannot be loaded, vLLM continues to serve the previous adapter.

        Raise BackendRefused if vLLM refuses the adapter and has never held an adapter, because vLLM
        then probably cannot hold adapters of this kind. Raise BackendError for all other failures.
        """
        name = policy_name(version)
        async with self._lock:
            await self._remove_unused()
            if name not in self._loaded:
                try:
                    await self._load(name, folder)
                except ActionFailed as failure:
                    if self._were_held:
                        raise
                    raise BackendRefused(f"{failure}; {MERGED_INSTEAD}") from None
            self._were_held = True
            previous = self._gate.adapter
            async with self._gate.drained(self._drain_bound_s):
                self._gate.serve_adapter(name, version)
            if previous is not None and not self._is_needed(previous):
                # vLLM knows it for a while, because a call may be about to be sent with its name.
                self._leave(previous, self._loaded[previous])

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        """Load the LoRA adapter in `folder` as the policy `name`. A policy is a version that vLLM
        holds beside the served weights. Raise ActionFailed if the adapter cannot be loaded, or if
        another version has this name."""
        async with self._lock:
            await self._remove_unused()
            if self._gate.adapter is None:
                raise ActionFailed(
                    "vLLM serves the model without adapters, beside which it can hold none: see "
                    "the server's log for why nothing is trained"
                )
            try:
                is_new = self.names.check(name, version)
            except ValueError as error:
                raise ActionFailed(str(error)) from None
            if is_new and name not in self._loaded:
                await self._load(name, folder)
            self.names.add(name, version)

    async def unload_policy(self, name: str) -> None:
        """Remove a policy (a version that vLLM holds beside the served weights). Running calls of
        the policy end normally. Raise ActionFailed if vLLM does not unload the policy. In this
        case, the policy stays loaded and can still be called."""
        async with self._lock:
            if name in self.names.loaded and name != self._gate.adapter:
                folder = self._loaded[name]
                was_served = any(one.folder == folder for one in self._leaving)
                if not was_served:
                    await self._unload(name)
                self._leave(name, folder)
            self.names.remove(name)
            await self._remove_unused()

    async def _load(self, name: str, folder: Path) -> None:
        self._check_rank(await asyncio.to_thread(_read_text, folder / CONFIG_FILE), folder)
        own = self._root / f"{name}-{next(self._numbers)}"
        try:
            await asyncio.to_thread(shutil.copytree, folder, own)
        except OSError as error:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
            raise BackendError(f"the adapters in {folder} cannot be copied: {error}") from None
        body = {"lora_name": name, "lora_path": str(own)}
        response = await self._post("load", body)
        is_loaded = response.is_ok
        if response.status == 0:  # vLLM may have taken them
            response = await self._post("load", body)
            is_loaded = response.is_ok or _ALREADY_LOADED in response.detail
        elif _ALREADY_LOADED in response.detail:  # with files of a change that was cancelled
            await self._post("unload", {"lora_name": name})
            response = await self._post("load", body)
            is_loaded = response.is_ok
        if not is_loaded:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
            if response.status == 0:
                raise BackendError(f"vLLM did not respond to an adapter: {response.detail}")
            raise ActionFailed(f"vLLM did not take the adapters {name}: {response.detail}")
        self._loaded[name] = own

    def _check_rank(self, config: str | None, folder: Path) -> None:
        rank = parse_object(config or "").get("r")
        if not isinstance(rank, int):
            raise ActionFailed(f"the folder {folder} has no LoRA adapters")
        if rank > self._max_rank:
            raise ActionFailed(
                f"the adapters have rank {rank}, and vLLM was started for {self._max_rank}: set "
                "lora_rank as the run began"
            )

    async def _unload(self, name: str) -> None:
        body = {"lora_name": name}
        response = await self._post("unload", body)
        if response.status == 0:  # vLLM may have unloaded it
            response = await self._post("unload", body)
        if not response.is_ok and response.status != 404:
            raise ActionFailed(f"vLLM did not unload {name}: {response.detail}")
        self._loaded.pop(name, None)

    async def _post(self, action: str, body: dict[str, str]) -> VllmResponse:
        return await self._client.post(f"/v1/{action}_lora_adapter", body, RELOAD_TIMEOUT_S)

    def _is_needed(self, name: str) -> bool:
        return name == self._gate.adapter or name in self.names.loaded

    def _leave(self, name: str, folder: Path) -> None:
        """Record that a LoRA adapter is no longer needed. Replace an earlier record of the same
        adapter."""
        self._leaving = [one for one in self._leaving if one.folder != folder]
        self._leaving.append(_Leaving(name, folder, self._gate.running))

    async def _remove_unused(self) -> None:
        """Unload the LoRA adapters that no call can use any longer, and delete their files. If an
        adapter cannot be unloaded, the next change of adapters tries again."""
        for one in list(self._leaving):
            if one.calls & self._gate.running:
                continue
            is_loaded = self._loaded.get(one.name) == one.folder
            if not (is_loaded and self._is_needed(one.name)):
                if is_loaded:
                    try:
                        await self._unload(one.name)
                    except ActionFailed as failure:  # isolated: it costs only memory
                        log.warning("%s", failure)
                        continue
                await asyncio.to_thread(shutil.rmtree, one.folder, ignore_errors=True)
            self._leaving.remove(one)


def adapter_root(run_dir: Path) -> Path:
    """Return the folder for the files of the loaded adapters. The path is absolute, because vLLM
    needs an absolute path."""
    return run_dir.resolve() / FOLDER_NAME


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return None
