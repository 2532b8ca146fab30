"""One vLLM in four setups: directly, behind server and proxy with one sibling, behind both with
four siblings, and behind both with four siblings whose rewards always tie.

In the first three setups all samples are reproducible: requests and siblings have seeds, and an
almost greedy temperature. The hook prefers the last sibling, so with four siblings the app never
gets the answer to its own request. In the fourth setup siblings are sampled at temperature 1, and
the seed of the request decides the ties.
"""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.vllm.command import serve_command, serve_environment
from fakevllm_server.backends.vllm.model_folder import read_chat_template
from fakevllm_server.backends.vllm.rollout import find_install
from fakevllm_server.types.engine_spec import EngineSpec
from tests.differential.corpus import KEY, Request
from tests.differential.raw_http import RawResponse, send
from tests.e2e.hook_files import write_hooks
from tests.e2e.processes import Process, Processes, free_port, wait_until

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
MODEL = "demo"
EXTRA = (
    # This is four times the context of the demo's model, so that tools and their results fit.
    '--hf-overrides={"max_position_embeddings": 2048}',
    # Otherwise the small model would write endless white space between two tokens of a grammar.
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)
TEMPERATURE = 0.01
"""Almost greedy. Requests at temperature 0 would not be fanned out."""
CONFIG = f"[job]\nbatch_size = 10000\nnum_repeat = 4\ntemperature = {TEMPERATURE}\n"
"""Configuration of the proxies. The batch never fills, so nothing is trained."""
PREFER_THE_LAST = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""
ALL_TIE = """
def on_compute_relative_reward(valid_results, all_answers):
    return [0.5 for _ in valid_results]
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment of vLLM. With so small a model, several threads would only wait for each other."""
DIRECT = "vLLM"
SIBLINGS = {"N=1": 1, "N=4": 4}
"""Number of siblings by setup with proxy and server."""
COMPARED = (DIRECT, *SIBLINGS)
"""The setups whose responses are compared."""
TIED = "N=4, tied"
"""Setup whose siblings are sampled at temperature 1 and have equal rewards."""


@dataclass
class Setups:
    """The running setups. Each request is sent once to each setup, to all of them at the same time,
    and its responses are kept."""

    urls: dict[str, str]
    """URL by setup."""
    proxies: dict[str, Process]

    def __post_init__(self) -> None:
        self._responses: dict[tuple[str, str], Future[RawResponse]] = {}
        self._pool = ThreadPoolExecutor(len(COMPARED))

    def send(self, setup: str, request: Request, corpus: dict[str, Request]) -> RawResponse:
        """Return the response of one setup. At the first call for a request, the request is sent to
        all setups. If the request follows another request, the other request is sent first."""
        if (setup, request.name) not in self._responses:
            if request.follows is not None:
                self.send(setup, corpus[request.follows], corpus)
            for each in COMPARED:
                sent = self._pool.submit(self._send, each, request)
                self._responses[each, request.name] = sent
        return self._responses[setup, request.name].result()

    def _send(self, setup: str, request: Request) -> RawResponse:
        if request.follows is not None:
            request = request.after(self._responses[setup, request.follows].result().id)
        return send(self.urls[setup], request)


@contextmanager
def start_all(
    folder: Path, model: Path = DEMO_MODEL_DIR, flags: Sequence[str] = EXTRA
) -> Generator[Setups]:
    """Start vLLM with these flags, and the server and proxies in front of it."""
    with (
        start_vllm(folder / "vllm", model, flags) as direct,
        start_behind(folder, direct, model) as setups,
    ):
        yield setups


@contextmanager
def start_behind(folder: Path, direct: str, model: Path) -> Generator[Setups]:
    """Start server and proxies in front of a vLLM that serves `model` at the URL `direct`."""
    with Processes(folder) as started:
        config = folder / "fakevllm.toml"
        config.write_text(CONFIG)
        hooks = folder / "hooks"
        hooks.mkdir()
        key_file = folder / "key"
        key_file.write_text(KEY)
        key_file.chmod(0o600)
        (hooks / "on_compute_relative_reward.py").write_text(PREFER_THE_LAST)
        server = started.server(
            *("--rollout", "vllm", "--rollout-url", direct, "--trainer", "embedded"),
            *("--model", str(model), "--served-model-name", MODEL),
            *("--rollout-key-file", str(key_file)),
        )
        proxies: dict[str, Process] = {}
        # The server takes the job of the first proxy that connects.
        for setup, num in reversed(SIBLINGS.items()):
            flags = ["--config", str(config), "--n", str(num), "--key-file", str(key_file)]
            flags += ["--hooks", str(hooks)] if num > 1 else []
            proxies[setup] = started.proxy(server, *flags, folder=f"proxy-{num}", wait=False)
            proxies[setup].wait_until_healthy(START_TIMEOUT_S)
        tied_config = folder / "tied.toml"
        tied_config.write_text(CONFIG.replace(f"temperature = {TEMPERATURE}", "temperature = 1.0"))
        hooks = write_hooks(folder / "tying-hooks", ALL_TIE)
        flags = ["--config", str(tied_config), "--key-file", str(key_file), "--hooks", str(hooks)]
        proxies[TIED] = started.proxy(server, *flags, folder="proxy-tied", wait=False)
        proxies[TIED].wait_until_healthy(START_TIMEOUT_S)
        urls = {setup: proxy.url for setup, proxy in proxies.items()}
        yield Setups({DIRECT: direct, **urls}, proxies)


@contextmanager
def start_vllm(
    folder: Path, model: Path = DEMO_MODEL_DIR, flags: Sequence[str] = EXTRA
) -> Generator[str]:
    """Start `vllm serve` as the server would, but on a TCP port, and yield its URL."""
    folder.mkdir()
    spec = EngineSpec("vllm", folder, str(model), MODEL, extra_args=tuple(flags))
    install = find_install()
    socket, port = folder / "engine.sock", free_port()
    arguments = serve_command(spec, install, socket, read_chat_template(spec.model, {}))
    index = arguments.index("--uds")
    arguments[index : index + 2] = ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--api-key", KEY]
    log_file = folder / "vllm.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,  # the process supervisor ends vLLM when this pipe closes
            stdout=log,
            stderr=log,
            env={**spec.environment, **serve_environment(spec.environment, install), **ONE_THREAD},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _is_up(process, url), START_TIMEOUT_S, lambda: _tail(log_file))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _is_up(process: subprocess.Popen[bytes], url: str) -> bool:
    assert process.poll() is None, "vLLM ended; see its log."
    try:
        return send(url, Request("", "GET", "/health")).status == 200
    except OSError:
        return False


def _tail(file: Path) -> str:
    return f"vLLM; its log:\n{file.read_text(errors='replace')[-4000:]}"
