"""vLLM as a Rollout: our child on a Unix socket, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
from pathlib import Path

from fakevllm_server.backends.process.process import ChildProcess
from fakevllm_server.backends.vllm.causes import cause_in
from fakevllm_server.backends.vllm.command import (
    KNOWN_VERSIONS,
    Install,
    command,
    environment,
    given_flags,
)
from fakevllm_server.backends.vllm.control import NO_ROUTE, Control
from fakevllm_server.backends.vllm.model_folder import chat_template, default_sampling
from fakevllm_server.backends.vllm.probes import probe, report
from fakevllm_server.backends.vllm.remote_url import base_of, peer_of
from fakevllm_server.backends.vllm.verdicts import refusal_of
from fakevllm_server.backends.vllm.watchdog import until_hung
from fakevllm_server.types.backend import BackendError, BackendRefused, Endpoint
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.weight_gate import WeightGate

log = logging.getLogger("fakevllm.server")

BOOT_TIMEOUT_S = 1800.0
"""Loading and compiling a large model."""
DRAIN_BOUND_S = 15.0
"""How long weights wait for calls in flight; longer ones go on with the new weights."""
MAX_FAILED_PUBLISHES = 3
"""In a row, by another's server; then it is reached and looked at anew."""
CHILD_URL = "http://engine"


class VllmRollout:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process = ChildProcess("vLLM", spec.log_file)
        self._control: Control | None = None
        self._socket: Path | None = None
        self._gate = WeightGate()
        self._closing: asyncio.Future[None] | None = None
        self._is_changing = False
        """Paused, or about to be: it samples nothing for anybody."""
        self._num_failed = 0
        """Publishes in a row that failed after the pause."""

    async def launch(self) -> Endpoint:
        """Raises BackendRefused where the user must mend something, BackendError where vLLM does
        not come up."""
        await self.close()
        try:
            return await (self._start() if self._spec.url is None else self._reach(self._spec.url))
        except BaseException:
            await self.close()
            raise

    async def load_weights(self, folder: Path, version: int) -> None:
        """Raises BackendError. Where vLLM could not be paused, the old weights go on. Later on a
        child is ended, for nobody may sample from weights nobody knows; another's server stays
        paused, and calls wait, until weights arrive."""
        control = self._running()
        async with self._gate.change(version, DRAIN_BOUND_S, lambda: self._pause(control)):
            try:
                await self._push(control, folder, version)
            except BackendError as failure:
                raise await self._lost_weights(failure, folder) from None
            self._is_changing, self._num_failed = False, 0

    async def health(self) -> bool:
        if self._num_failed >= MAX_FAILED_PUBLISHES or self._control is None:
            return False
        if self._socket is not None and not self._process.is_running:
            return False
        return await self._control.is_healthy()

    async def lost(self) -> str:
        """Its end, or that it hangs; it is ended then."""
        if self._control is None:
            return "vLLM is not running"
        hung = asyncio.ensure_future(self._until_hung(self._control))
        watched = {hung}
        if self._socket is not None:
            watched.add(asyncio.ensure_future(self._process.lost()))
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if hung in done:
                await self.close()
            return done.pop().result()
        finally:
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def close(self) -> None:
        """Where it is cut off the engine is closed all the same; the next close waits for that."""
        if self._closing is None or self._closing.done():
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._gate.abandon()
        if self._control is not None:
            if self._is_changing and self._socket is None:
                await self._leave_resumed(self._control)
            await self._control.close()
            self._control = None
        self._is_changing, self._num_failed = False, 0
        await self._process.close()
        if self._socket is not None:
            self._spec.remove_socket(self._socket)
            self._socket = None

    async def _start(self) -> Endpoint:
        spec, install = self._spec, find_install()
        if not install.is_known:
            low, high = (".".join(map(str, version)) for version in KNOWN_VERSIONS)
            log.warning("vLLM %s is untried: known are >=%s,<%s", install.version, low, high)
        template = chat_template(spec.model, given_flags(spec.extra_args))
        self._socket = spec.new_socket()
        await self._process.start(
            command(spec, install, self._socket, template),
            environment(spec.environment, install),
        )
        self._control = Control(CHILD_URL, self._socket, {})
        written = _size(spec.log_file)
        try:
            await self._process.until(self.health, BOOT_TIMEOUT_S)
        except BackendRefused:
            raise
        except BackendError as failure:
            cause = cause_in(_text_from(spec.log_file, written))
            raise failure if cause is None else BackendError(f"{failure}: {cause}") from None
        return await self._probed(self._control, CHILD_URL, {})

    async def _reach(self, url: str) -> Endpoint:
        key = self._spec.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url, peer = base_of(url), peer_of(url)
        self._control = control = Control(url, None, headers)
        answer = await control.get("/health")
        if not answer.is_ok:
            raise BackendError(
                f"vLLM at {peer} cannot be reached ({answer.detail}): "
                "start it, or mend --rollout-url"
            )
        if await control.is_paused():
            log.warning("vLLM at %s was paused; it goes on", peer)
            await control.resume()
        return await self._probed(control, url, headers)

    async def _probed(self, control: Control, url: str, headers: dict[str, str]) -> Endpoint:
        flags = given_flags(self._spec.extra_args)
        template = chat_template(self._spec.model, flags)
        model, verdicts = await probe(control, self._spec.served_model_name, template)
        report(verdicts, self._spec.run_dir)
        self._gate = WeightGate()
        return Endpoint(
            self._socket,
            url,
            model.name,
            model.max_model_len,
            default_sampling(self._spec.model, flags),
            headers=headers,
            refusal=refusal_of(verdicts),
            gate=self._gate,
        )

    async def _pause(self, control: Control) -> None:
        """Raises BackendError where it fails; vLLM goes on then, as far as it can be told to."""
        self._is_changing = True
        try:
            await control.pause()
        except BackendError as failure:
            if self._num_failed:  # What it has are not the old weights.
                raise await self._stuck(failure) from None
            # It may have come through all the same.
            answer = await control.post("/resume")
            self._is_changing = False
            if not answer.is_ok and answer.status not in NO_ROUTE:
                raise await self._stuck(failure) from None
            told = f"{self._name} was not paused for new weights and keeps its old ones: {failure}"
            raise type(failure)(told) from None

    async def _stuck(self, failure: BackendError) -> BackendError:
        """It may be paused or not: it is started, or reached, anew."""
        if self._spec.url is None:
            await self.close()
            return BackendError(
                f"vLLM could not be paused for new weights and was ended: {failure}"
            )
        self._is_changing, self._num_failed = True, MAX_FAILED_PUBLISHES
        self._warn_paused()
        return BackendError(f"{self._name} was not paused for new weights: {failure}")

    async def _push(self, control: Control, folder: Path, version: int) -> None:
        try:
            await control.load_weights(folder, version)
        except BackendError as failure:
            log.warning("weights did not reach vLLM: %s; trying once more", failure)
            # Its own resume may have come through.
            await control.pause()
            await control.load_weights(folder, version)

    async def _lost_weights(self, failure: BackendError, folder: Path) -> BackendError:
        if self._spec.url is None:
            await self.close()
            return BackendError(f"vLLM did not take new weights and was ended: {failure}")
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED_PUBLISHES:
            self._warn_paused()
        return BackendError(
            f"{self._name} did not take the weights in {folder}: {failure}. It must "
            "see that folder under the same path: name one that both see with --weights-dir"
        )

    async def _leave_resumed(self, control: Control) -> None:
        if not (await control.post("/resume")).is_ok:
            self._warn_paused()

    def _warn_paused(self) -> None:
        log.warning(
            "%s may still be paused, for others too: resume it with curl -X POST %s/resume",
            self._name,
            base_of(self._spec.url or CHILD_URL),
        )

    @property
    def _name(self) -> str:
        return "vLLM" if self._spec.url is None else f"vLLM at {peer_of(self._spec.url)}"

    async def _until_hung(self, control: Control) -> str:
        how = await until_hung(control, lambda: self._gate.num_running, lambda: self._is_changing)
        return f"vLLM {how}"

    def _running(self) -> Control:
        if self._control is None:
            raise BackendError("vLLM is not running")
        return self._control


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _text_from(file: Path, position: int) -> str:
    """What was written into the log since."""
    with file.open("rb") as log:
        log.seek(position)
        return log.read().decode(errors="replace")


def find_install() -> Install:
    """The vLLM of this Python, which is not imported. Raises BackendRefused where there is none."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or importlib.util.find_spec("vllm") is None:
        raise BackendRefused(
            "vLLM is not installed: pip install -e '.[vllm]', "
            "or on a CPU server/cpu/make_environment.sh FOLDER"
        )
    return Install(version)
