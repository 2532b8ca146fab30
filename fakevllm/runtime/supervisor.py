"""Processes of ours beside a command, started as a user would start them, and again when they
die."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakevllm.errors import FakevllmError, UserError

STOP_GRACE_S = 120.0
"""A server's stop waits for the step in hand, saves what was trained, and closes its engine."""
MAX_RESTARTS = 20
MIN_LIFE_S = 2.0
"""A process that dies sooner than this after its start is waited for before it is started again."""


class Supervised:
    """One process, kept running. It leaves by itself when we are gone: it holds the other end of
    our pipe.

    It listens on a socket of ours, which outlives it: nobody else gets its port, and who connects
    while it is started again waits and is not refused."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log_file: Path,
        listener: socket.socket,
    ) -> None:
        self.name = name
        self.num_restarts = 0
        fd = str(listener.fileno())
        self._command = [sys.executable, "-m", module, *arguments, "--listen-fd", fd]
        self._command += ["--until-stdin-closes"]
        self._listener = listener
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self, on_restart: Callable[[str], None]) -> None:
        """Until cancelled. Raises FakevllmError when the process will not stay up."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                code = await self._live()
                if self.num_restarts >= MAX_RESTARTS or code == 2:
                    raise FakevllmError(
                        f"{self.name} does not stay up (exit code {code}): {self._last_line()} "
                        f"(see {self._log_file})"
                    )
                self.num_restarts += 1
                on_restart(f"{self.name} died (exit code {code}) and was started again")
                await asyncio.sleep(max(0.0, MIN_LIFE_S - (loop.time() - started)))
        finally:
            await self._stop()

    async def _live(self) -> int:
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self._listener.fileno()],
            )
        return await self._process.wait()

    def _last_line(self) -> str:
        """Where a process refuses what it was given, it says so last."""
        lines = self._log_file.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it says nothing"

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def kept_up(
    parts: Sequence[Supervised], on_restart: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Until the block ends; one that cannot be kept up ends it. They are stopped in reverse, one
    after the other: what the last one still has to send reaches those before it."""
    body = asyncio.current_task()
    assert body is not None
    keepers = [asyncio.create_task(part.run(on_restart)) for part in parts]

    def give_up(keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled():
            body.cancel()

    for keeper in keepers:
        keeper.add_done_callback(give_up)
    try:
        yield
    except asyncio.CancelledError:
        for keeper in keepers:
            if keeper.done() and (error := keeper.exception()) is not None:
                raise error from None
        raise
    finally:
        for keeper in keepers:
            keeper.remove_done_callback(give_up)
        for keeper in reversed(keepers):
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


def make_run_folder(folder: Path, setting: str) -> None:
    """`setting`: where its user has named it. Raises UserError."""
    try:
        # What is asked and answered is nobody else's business.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be used ({error.strerror}): name another {setting}."
        ) from None


# The engines a command may bring: what they are called, need and take to start. Decides only: the
# server starts them.

PAIRS = {
    "fake": ("fake", "fake"),
    "embedded": ("embedded", "embedded"),
    "vllm": ("vllm", "embedded"),
    "verl": ("vllm", "verl"),
}
"""The server's `--backend NAME` -> its rollout and its trainer."""

MODULES = {
    "fake": (),
    "embedded": ("torch", "transformers"),
    "vllm": ("vllm",),
    "verl": ("verl", "ray"),
}
"""What must be installed for an engine."""

OWN_READY_TIMEOUT_S = 120.0
REAL_READY_TIMEOUT_S = 600.0
"""Libraries of gigabytes are loaded, and kernels compiled on a first start."""


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class Engines:
    """
    >>> Engines.named("vllm")
    Engines(rollout='vllm', trainer='embedded')
    >>> Engines.named("vllm", trainer="verl").title
    'vllm samples, verl trains'
    """

    rollout: str
    trainer: str

    @staticmethod
    def named(backend: str, rollout: str | None = None, trainer: str | None = None) -> Engines:
        """A pair, and what is to stand in the place of its halves. Raises UserError."""
        rollouts, trainers = (sorted(set(column)) for column in zip(*PAIRS.values(), strict=True))
        for flag, name, known in (
            ("--backend", backend, sorted(PAIRS)),
            ("--rollout", rollout, rollouts),
            ("--trainer", trainer, trainers),
        ):
            if name is not None and name not in known:
                raise UserError(f"{flag} must be one of {', '.join(known)}, got {name!r}.")
        own = PAIRS[backend]
        engines = Engines(rollout or own[0], trainer or own[1])
        if (engines.rollout == "fake") != (engines.trainer == "fake"):
            raise UserError(
                "The fake engine has no tokens in common with any other: --backend fake is both."
            )
        return engines

    @property
    def names(self) -> tuple[str, ...]:
        """Each engine once, as each is one process."""
        return tuple(dict.fromkeys((self.rollout, self.trainer)))

    @property
    def title(self) -> str:
        if self.rollout == self.trainer:
            return f"{self.rollout} samples and trains"
        return f"{self.rollout} samples, {self.trainer} trains"

    @property
    def has_model(self) -> bool:
        return self.rollout != "fake"

    @property
    def ready_timeout_s(self) -> float:
        is_real = {"vllm", "verl"} & set(self.names)
        return REAL_READY_TIMEOUT_S if is_real else OWN_READY_TIMEOUT_S

    @property
    def flags(self) -> list[str]:
        """That choose these engines, for the server and for the demo alike."""
        for pair, both in PAIRS.items():
            if both == (self.rollout, self.trainer):
                return [] if pair == "embedded" else ["--backend", pair]
        return ["--rollout", self.rollout, "--trainer", self.trainer]

    def need_installed(self, is_installed: Callable[[str], bool] = _is_installed) -> None:
        """Raises UserError, before anything is started, where a package is missing."""
        for name in self.names:
            missing = [module for module in MODULES[name] if not is_installed(module)]
            if missing:
                raise UserError(
                    f"The {name} engine needs {' and '.join(missing)}, not installed in this "
                    f"Python: {_mend(name)}"
                )


def _mend(engine: str) -> str:
    command = f"pip install -e '.[{engine}]'"
    if engine == "embedded":
        return command
    return f"{command} where there is a GPU, else server/cpu/make_environment.sh FOLDER"
