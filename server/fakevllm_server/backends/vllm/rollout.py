"""vLLM as a Rollout: our child on a Unix socket, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from urllib.parse import urlsplit

from fakevllm_server.backends.base import BackendError, BackendRefused, Endpoint
from fakevllm_server.backends.process import ChildProcess
from fakevllm_server.backends.spec import EngineSpec
from fakevllm_server.backends.vllm.causes import cause_in
from fakevllm_server.backends.vllm.command import (
    KNOWN_VERSIONS,
    Install,
    command,
    environment,
    given_flags,
)
from fakevllm_server.backends.vllm.control import Control
from fakevllm_server.backends.vllm.model_folder import chat_template, default_sampling
from fakevllm_server.backends.vllm.probes import probe, report
from fakevllm_server.backends.vllm.verdicts import refusal_of
from fakevllm_server.backends.vllm.watchdog import until_hung
from fakevllm_server.weight_gate import WeightGate

log = logging.getLogger("fakevllm.server")

BOOT_TIMEOUT_S = 1800.0
"""Loading and compiling a large model."""
DRAIN_BOUND_S = 15.0
"""How long weights wait for calls in flight; longer ones go on with the new weights."""
CHILD_URL = "http://engine"


class VllmRollout:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process = ChildProcess("vLLM", spec.log_file)
        self._control: Control | None = None
        self._socket: Path | None = None
        self._gate = WeightGate()
        self._is_changing = False
        """Paused, or about to be: it samples nothing for anybody."""

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
        """Raises BackendError. A child is ended then, for nobody may sample from weights nobody
        knows; another's server stays paused, and calls wait, until weights arrive."""
        control = self._running()
        async with self._gate.change(version, DRAIN_BOUND_S):
            self._is_changing = True
            try:
                await self._push(control, folder)
            except BackendError as failure:
                raise await self._lost_weights(failure, folder) from None
            self._is_changing = False
            if not await control.tell_version(version):
                log.debug("vLLM was not told the version of its weights: not in this version")

    async def health(self) -> bool:
        if self._control is None or (self._socket is not None and not self._process.is_running):
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
        control, self._control = self._control, None
        path, self._socket = self._socket, None
        if control is not None:
            if self._is_changing and path is None:
                await control.post("/resume")
            await control.close()
        self._is_changing = False
        await self._process.close()
        if path is not None:
            self._spec.remove_socket(path)

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
        url = base_of(url)
        self._control = control = Control(url, None, headers)
        answer = await control.get("/health")
        if not answer.is_ok:
            raise BackendError(
                f"vLLM at {url} cannot be reached ({answer.detail}): "
                "start it, or mend --rollout-url"
            )
        if await control.is_paused():
            log.warning("vLLM at %s was paused; it goes on", url)
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

    async def _push(self, control: Control, folder: Path) -> None:
        try:
            await control.load_weights(folder)
        except BackendError as failure:
            log.warning("weights did not reach vLLM: %s; trying once more", failure)
            await control.load_weights(folder)

    async def _lost_weights(self, failure: BackendError, folder: Path) -> BackendError:
        if self._spec.url is None:
            await self.close()
            return BackendError(f"vLLM did not take new weights and was ended: {failure}")
        return BackendError(
            f"vLLM at {self._spec.url} did not take the weights in {folder}: {failure}. It must "
            "see that folder under the same path: name one that both see with --weights-dir"
        )

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


def base_of(url: str) -> str:
    """
    >>> base_of("http://gpu-box:8000/v1/")
    'http://gpu-box:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BackendRefused(f"{url!r} is no URL: give --rollout-url http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")
