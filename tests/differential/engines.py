"""One vLLM, reached in three ways: directly, and behind server and proxy with one sibling and with
four.

All that is sampled is decided: requests name seeds and a temperature that is all but greedy, so do
the siblings, and the hook prefers the last one, so that with four it is never the app's own request
that is answered.
"""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.vllm.command import serve_command, serve_environment
from fakevllm_server.backends.vllm.model_folder import read_chat_template
from fakevllm_server.backends.vllm.rollout import find_install
from fakevllm_server.types.engine_spec import EngineSpec
from tests.differential.asking import Seen, ask
from tests.differential.corpus import KEY, Request
from tests.e2e.processes import Process, Processes, free_port, wait_until

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
MODEL = "demo"
EXTRA = (
    # Four times what the demo's model was made for, so that tools and their results fit.
    '--hf-overrides={"max_position_embeddings": 2048}',
    # Between two tokens of a grammar the small model would write blanks without end.
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)
TEMPERATURE = 0.01
"""Greedy to all effects, while requests at temperature 0 would not be fanned out."""
CONFIG = f"[job]\nbatch_size = 10000\nnum_repeat = 4\ntemperature = {TEMPERATURE}\n"
"""Nothing is ever trained."""
PREFER_THE_LAST = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(sibling.index) for sibling in valid_results]
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""A model this small only waits for the others."""
DIRECT = "vLLM"
WAYS = {"N=1": 1, "N=4": 4}
"""Behind proxy and server, by the number of siblings."""


@dataclass
class Ways:
    """Each request is asked once in each way; what follows another is asked after it."""

    urls: dict[str, str]
    proxies: dict[str, Process]

    def __post_init__(self) -> None:
        self._seen: dict[tuple[str, str], Seen] = {}

    def ask(self, way: str, request: Request, corpus: dict[str, Request]) -> Seen:
        key = way, request.name
        if key not in self._seen:
            if request.follows is not None:
                before = self.ask(way, corpus[request.follows], corpus)
                request = request.after(before.id)
            self._seen[key] = ask(self.urls[way], request)
        return self._seen[key]


@contextmanager
def ways(
    folder: Path, model: Path = DEMO_MODEL_DIR, flags: Sequence[str] = EXTRA
) -> Generator[Ways]:
    """`flags`: vLLM's."""
    with vllm(folder / "vllm", model, flags) as direct, behind(folder, direct, model) as asked:
        yield asked


@contextmanager
def behind(folder: Path, direct: str, model: Path) -> Generator[Ways]:
    """`direct`: the URL of a vLLM that serves `model`."""
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
        for way, num in reversed(WAYS.items()):  # the first one's job is the server's
            flags = ["--config", str(config), "--n", str(num), "--key-file", str(key_file)]
            flags += ["--hooks", str(hooks)] if num > 1 else []
            proxies[way] = started.proxy(server, *flags, folder=f"proxy-{num}", wait=False)
            proxies[way].wait_until_healthy(START_TIMEOUT_S)
        yield Ways({DIRECT: direct, **{way: proxies[way].url for way in WAYS}}, proxies)


@contextmanager
def vllm(
    folder: Path, model: Path = DEMO_MODEL_DIR, flags: Sequence[str] = EXTRA
) -> Generator[str]:
    """`vllm serve` as the server would start it, but on a port. Yields its URL."""
    folder.mkdir()
    spec = EngineSpec("vllm", folder, str(model), MODEL, extra_args=tuple(flags))
    install = find_install()
    socket, port = folder / "engine.sock", free_port()
    arguments = serve_command(spec, install, socket, read_chat_template(spec.model, {}))
    where = arguments.index("--uds")
    arguments[where : where + 2] = ["--host", "127.0.0.1", "--port", str(port)]
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
    assert process.poll() is None, "vLLM ended"
    try:
        return ask(url, Request("", "GET", "/health")).status == 200
    except OSError:
        return False


def _tail(file: Path) -> str:
    return f"vLLM; its log:\n{file.read_text(errors='replace')[-4000:]}"
