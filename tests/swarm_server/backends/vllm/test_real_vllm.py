"""Real vLLM with the shipped demo model: its start, new weights, and the detection of its end.

The tests share one vLLM, because a start takes half a minute. A test may leave any weights behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from swarm_server.backends.vllm.greedy import Greedy, save_perturbed_model
from swarm_server.backends.vllm.processes import api_process, is_supervisor, living_processes

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.vllm import rollout as rollout_module
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.training.weight_probe import compare
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.known_prompt import MAX_TOKENS

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_TOKENS = 24
QUESTIONS = ["What is 2 plus 3?", "What is 7 plus 1?", "How much is 4 plus 4?"]


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: list[int]
    ids: list[int]
    versions: list[int]


@dataclass(slots=True)
class Engines:
    """At most one vLLM at a time. It is restarted if it has ended or needs other arguments."""

    run_dir: Path
    rollout: VllmRollout | None = None
    endpoint: Endpoint | None = None
    version: int = 0
    _arguments: tuple[str, ...] = field(default=())

    async def up(self, *arguments: str) -> Endpoint:
        rollout, is_same = self.rollout, self._arguments == arguments
        if rollout is not None and self.endpoint is not None and is_same and await rollout.health():
            return self.endpoint
        await self.close()
        model = str(DEMO_MODEL_DIR)
        spec = EngineSpec("vllm", self.run_dir, model, "demo", extra_args=arguments)
        self.rollout, self._arguments = VllmRollout(spec), arguments
        self.endpoint = await self.rollout.launch()
        return self.endpoint

    async def push(self, folder: Path) -> int:
        """Load weights into vLLM and return their version."""
        assert self.rollout is not None
        self.version += 1
        await self.rollout.load_weights(folder, self.version)
        return self.version

    async def close(self) -> None:
        if self.rollout is not None:
            await self.rollout.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("run"))
    yield engines
    await engines.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two folders with different weights."""
    return [save_perturbed_model(tmp_path_factory.mktemp("weights"), seed) for seed in (1, 2)]


@asynccontextmanager
async def app(endpoint: Endpoint) -> AsyncGenerator[aiohttp.ClientSession]:
    assert endpoint.socket is not None
    # vLLM closes an idle connection after five seconds. transformers may take longer than that.
    connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0, force_close=True)
    async with aiohttp.ClientSession(endpoint.url, connector=connector) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, text: str, num_tokens: int = NUM_TOKENS
) -> Answer:
    """Request a greedy answer through the gate."""
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with endpoint.gate.call() as stamp:
        async with session.post("/v1/chat/completions", json=request) as response:
            body = await response.json()
            assert response.status == 200, body
        versions = list(stamp.versions)
    return Answer(body["prompt_token_ids"], body["choices"][0]["token_ids"], versions)


async def test_every_capability_check_succeeds(engines: Engines) -> None:
    endpoint = await engines.up()
    assert endpoint.refusal is None
    assert (endpoint.model_name, endpoint.max_model_len) == ("demo", 512)
    results = json.loads((engines.run_dir / "engine_probes.json").read_text())
    assert len(results) == 8
    assert [result for result in results if not result["ok"]] == []


async def test_only_the_owner_may_access_the_socket(engines: Engines) -> None:
    endpoint = await engines.up()
    assert endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o077 == 0


async def test_after_a_push_the_answers_are_those_of_transformers_with_the_new_weights(
    engines: Engines, folders: list[Path]
) -> None:
    endpoint = await engines.up()
    answers: list[list[int]] = []
    async with app(endpoint) as session:
        for folder in (folders[0], DEMO_MODEL_DIR, folders[1], folders[0]):
            version = await engines.push(folder)
            model = Greedy(folder)
            for question in QUESTIONS:
                answer = await ask(session, endpoint, question)
                assert answer.versions == [version]
                assert answer.ids == model.answer(answer.prompt_ids, NUM_TOKENS)
                answers.append(answer.ids)
    assert answers[:3] != answers[3:6] != answers[6:9]
    assert answers[:3] == answers[9:]


async def test_the_known_prompt_shows_stale_weights_and_no_rounding(
    engines: Engines, folders: list[Path]
) -> None:
    await engines.up()
    assert engines.rollout is not None
    await engines.push(folders[0])
    reply = await engines.rollout.probe()
    assert reply is not None and len(reply.ids) == MAX_TOKENS
    same, other = [compare(reply, Greedy(folder).log_probs(reply.ids)) for folder in folders]
    assert same is not None and same.is_same and same.difference < 1e-4
    assert other is not None and not other.is_same
    await engines.push(folders[1])
    again = await engines.rollout.probe()
    assert again is not None
    now, before = [compare(again, Greedy(folder).log_probs(reply.ids)) for folder in folders[::-1]]
    assert now is not None and now.difference < 1e-4
    assert before is not None and not before.is_same
    print(f"the same weights: {same}; other weights: {other}")


async def count_started(session: aiohttp.ClientSession) -> int:
    """Return the number of answers with a first token since the start of this vLLM."""
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    counter = "vllm:time_to_first_token_seconds_count"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(counter))


async def test_a_request_in_flight_continues_with_the_new_weights_and_an_empty_cache(
    engines: Engines, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_module, "DRAIN_BOUND_S", 0.0)
    endpoint = await engines.up()
    old, new = Greedy(folders[0]), Greedy(folders[1])
    before = await engines.push(folders[0])
    async with app(endpoint) as session:
        num_before = await count_started(session)
        calls = [asyncio.create_task(ask(session, endpoint, text, 400)) for text in QUESTIONS]
        while await count_started(session) < num_before + len(calls):
            assert not any(call.done() for call in calls)
        after = await engines.push(folders[1])
        answers = await asyncio.gather(*calls)
    for answer in answers:
        assert answer.versions == [before, after]
        is_of_old = old.is_greedy_token(answer.prompt_ids, answer.ids)
        is_of_new = new.is_greedy_token(answer.prompt_ids, answer.ids)
        switch = is_of_old.index(False)
        assert 0 < switch < len(answer.ids)
        # With cached keys and values of the old weights, some tokens would be of neither model.
        assert all(is_of_new[switch:])


async def test_no_request_fails_during_pushes_and_each_has_the_right_version(
    engines: Engines, folders: list[Path]
) -> None:
    endpoint = await engines.up()
    expected: dict[tuple[int, str], list[int]] = {}
    folder_of_version: dict[int, int] = {}
    answers: list[tuple[str, Answer]] = []
    is_done = asyncio.Event()

    async def send_requests(text: str) -> None:
        while not is_done.is_set():
            answers.append((text, await ask(session, endpoint, text)))

    async with app(endpoint) as session:
        for text in QUESTIONS:
            prompt_ids = (await ask(session, endpoint, text)).prompt_ids
            for index, folder in enumerate(folders):
                expected[index, text] = Greedy(folder).answer(prompt_ids, NUM_TOKENS)
        clients = [asyncio.create_task(send_requests(text)) for text in QUESTIONS * 3]
        for push in range(20):
            folder_of_version[await engines.push(folders[push % 2])] = push % 2
            before = len(answers)
            while len(answers) < before + len(clients):
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in clients)
        is_done.set()
        await asyncio.gather(*clients)
    assert {
        version for _, answer in answers for version in answer.versions
    } == folder_of_version.keys()
    # On a very slow machine a call may take longer than DRAIN_BOUND_S, and have two versions.
    settled = [(text, answer) for text, answer in answers if len(answer.versions) == 1]
    assert len(settled) > len(answers) / 2
    for text, answer in settled:
        assert answer.ids == expected[folder_of_version[answer.versions[0]], text]


async def test_weights_that_cannot_be_loaded_end_vllm_and_it_can_be_started_again(
    engines: Engines, tmp_path: Path
) -> None:
    endpoint = await engines.up()
    with pytest.raises(rollout_module.BackendError, match="was ended"):
        await engines.push(tmp_path)
    assert engines.rollout is not None and not await engines.rollout.health()
    assert (await engines.up()).gate is not endpoint.gate


async def test_a_killed_api_process_is_reported(engines: Engines) -> None:
    """tests/e2e/test_real_engines.py starts vLLM again after such a kill."""
    await engines.up()
    killed = r"vLLM exited with code 137 \(killed: out of memory\?\); see /.*/engine\.log"
    assert re.fullmatch(killed, await kill(engines, "entrypoints"))


async def kill(engines: Engines, victim: str) -> str:
    """Kill one process of the running vLLM. Return the report once no other process is left."""
    assert engines.rollout is not None and engines.endpoint is not None
    assert engines.endpoint.socket is not None
    api = api_process(engines.endpoint.socket)
    group = [process for process in living_processes() if process.group == api.group]
    assert len(group) >= 4
    lost = asyncio.create_task(engines.rollout.lost())
    victims = (p for p in group if victim in p.command and not is_supervisor(p))
    os.kill(next(victims).pid, signal.SIGKILL)
    report = await asyncio.wait_for(lost, 60)
    assert [process for process in living_processes() if process.group == api.group] == []
    assert not await engines.rollout.health()
    return report


WRONG_SETUP = ("--logprobs-mode=raw_logprobs", "--no-enable-auto-tool-choice")


async def test_with_a_wrong_setup_vllm_serves_and_the_refusal_names_the_fixes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    endpoint = await engines.up(*WRONG_SETUP)
    assert "--logprobs-mode processed_logprobs" in (endpoint.refusal or "")
    assert "VLLM_SERVER_DEV_MODE=1" in (endpoint.refusal or "")
    results = json.loads((engines.run_dir / "engine_probes.json").read_text())
    fixes = {result["name"]: result["mend"] for result in results if not result["ok"]}
    assert fixes["tool calls"] == "--enable-auto-tool-choice --tool-call-parser hermes"
    async with app(endpoint) as session:
        assert (await ask(session, endpoint, QUESTIONS[0])).ids


async def test_a_killed_engine_process_is_reported(engines: Engines) -> None:
    await engines.up(*WRONG_SETUP)  # the setup does not matter, and this vLLM runs already
    assert "vLLM exited with code" in await kill(engines, "EngineCore")
