"""Real vLLM with the shipped demo model: it starts, its weights change, and its end is seen.

The tests share one vLLM, which takes half a minute to start, and leave weights of any version.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from swarm_server.backends.vllm.greedy import Greedy, disturbed
from swarm_server.backends.vllm.processes import api_process, running

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.vllm import rollout as rollout_module
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.types.backend import Endpoint
from fakevllm_server.types.engine_spec import EngineSpec

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_TOKENS = 24
QUESTIONS = ["What is 2 plus 3?", "What is 7 plus 1?", "How much is 4 plus 4?"]


@dataclass(frozen=True, slots=True)
class Said:
    prompt_ids: list[int]
    ids: list[int]
    versions: list[int]


@dataclass(slots=True)
class Engines:
    """At most one vLLM at a time, started anew where other arguments or an end ask for it."""

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
        """The version it has from now on."""
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
    """Two sets of weights."""
    return [disturbed(tmp_path_factory.mktemp("weights"), seed) for seed in (1, 2)]


@asynccontextmanager
async def app(endpoint: Endpoint) -> AsyncGenerator[aiohttp.ClientSession]:
    assert endpoint.socket is not None
    # vLLM closes a kept connection after five seconds, which transformers may take meanwhile.
    connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0, force_close=True)
    async with aiohttp.ClientSession(endpoint.url, connector=connector) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, text: str, num_tokens: int = NUM_TOKENS
) -> Said:
    """A greedy answer, through the gate."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with endpoint.gate.call() as stamp:
        async with session.post("/v1/chat/completions", json=body) as answer:
            told = await answer.json()
            assert answer.status == 200, told
        versions = list(stamp.versions)
    return Said(told["prompt_token_ids"], told["choices"][0]["token_ids"], versions)


async def test_every_probe_is_good(engines: Engines) -> None:
    endpoint = await engines.up()
    assert endpoint.refusal is None
    assert (endpoint.model_name, endpoint.max_model_len) == ("demo", 512)
    found = json.loads((engines.run_dir / "engine_probes.json").read_text())
    assert len(found) == 8
    assert [verdict for verdict in found if not verdict["ok"]] == []


async def test_only_its_owner_may_reach_it(engines: Engines) -> None:
    endpoint = await engines.up()
    assert endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o077 == 0


async def test_after_a_push_it_answers_as_transformers_does_with_those_weights(
    engines: Engines, folders: list[Path]
) -> None:
    endpoint = await engines.up()
    answers: list[list[int]] = []
    async with app(endpoint) as session:
        for folder in (folders[0], DEMO_MODEL_DIR, folders[1], folders[0]):
            version = await engines.push(folder)
            model = Greedy(folder)
            for question in QUESTIONS:
                said = await ask(session, endpoint, question)
                assert said.versions == [version]
                assert said.ids == model.answer(said.prompt_ids, NUM_TOKENS)
                answers.append(said.ids)
    assert answers[:3] != answers[3:6] != answers[6:9]
    assert answers[:3] == answers[9:]


async def num_begun(session: aiohttp.ClientSession) -> int:
    """Answers that have a first token, since this vLLM is up."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    told = "vllm:time_to_first_token_seconds_count"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(told))


async def test_a_request_in_flight_goes_on_with_the_new_weights_and_nothing_of_the_old_ones(
    engines: Engines, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_module, "DRAIN_BOUND_S", 0.0)
    endpoint = await engines.up()
    old, new = Greedy(folders[0]), Greedy(folders[1])
    before = await engines.push(folders[0])
    async with app(endpoint) as session:
        before_them = await num_begun(session)
        calls = [asyncio.create_task(ask(session, endpoint, text, 400)) for text in QUESTIONS]
        while await num_begun(session) < before_them + len(calls):
            assert not any(call.done() for call in calls)
        after = await engines.push(folders[1])
        answers = await asyncio.gather(*calls)
    for said in answers:
        assert said.versions == [before, after]
        of_old = old.would_say(said.prompt_ids, said.ids)
        of_new = new.would_say(said.prompt_ids, said.ids)
        switched = of_old.index(False)
        assert 0 < switched < len(said.ids)
        # What the old weights left in the cache would show as tokens of neither.
        assert all(of_new[switched:])


async def test_no_request_fails_while_weights_change_and_each_carries_the_right_version(
    engines: Engines, folders: list[Path]
) -> None:
    endpoint = await engines.up()
    expected: dict[tuple[int, str], list[int]] = {}
    of_version: dict[int, int] = {}
    answers: list[tuple[str, Said]] = []
    is_over = asyncio.Event()

    async def keep_asking(text: str) -> None:
        while not is_over.is_set():
            answers.append((text, await ask(session, endpoint, text)))

    async with app(endpoint) as session:
        for text in QUESTIONS:
            prompt_ids = (await ask(session, endpoint, text)).prompt_ids
            for index, folder in enumerate(folders):
                expected[index, text] = Greedy(folder).answer(prompt_ids, NUM_TOKENS)
        askers = [asyncio.create_task(keep_asking(text)) for text in QUESTIONS * 3]
        for push in range(20):
            of_version[await engines.push(folders[push % 2])] = push % 2
            before = len(answers)
            while len(answers) < before + len(askers):
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in askers)
        is_over.set()
        await asyncio.gather(*askers)
    assert {version for _, said in answers for version in said.versions} == of_version.keys()
    # On a very slow machine a call may outlast the bound, and have two.
    settled = [(text, said) for text, said in answers if len(said.versions) == 1]
    assert len(settled) > len(answers) / 2
    for text, said in settled:
        assert said.ids == expected[of_version[said.versions[0]], text]


async def test_weights_that_do_not_fit_end_it_and_it_can_be_started_again(
    engines: Engines, tmp_path: Path
) -> None:
    endpoint = await engines.up()
    with pytest.raises(rollout_module.BackendError, match="was ended"):
        await engines.push(tmp_path)
    assert engines.rollout is not None and not await engines.rollout.health()
    assert (await engines.up()).gate is not endpoint.gate


async def test_a_killed_api_process_is_told_and_it_can_be_started_again(engines: Engines) -> None:
    assert (
        await kill(engines, "entrypoints")
        == "vLLM exited with code 137 (killed: out of memory?); see engine.log"
    )
    endpoint = await engines.up()
    async with app(endpoint) as session:
        assert (await ask(session, endpoint, QUESTIONS[0])).versions == [0]


async def test_a_killed_engine_process_is_told(engines: Engines) -> None:
    assert "vLLM exited with code" in await kill(engines, "EngineCore")


async def kill(engines: Engines, victim: str) -> str:
    """Of the running vLLM, one process; what is told of it once nothing is left of the others."""
    endpoint = await engines.up()
    assert engines.rollout is not None and endpoint.socket is not None
    api = api_process(endpoint.socket)
    group = [one for one in running() if one.group == api.group]
    assert len(group) >= 4
    lost = asyncio.create_task(engines.rollout.lost())
    victims = (one for one in group if victim in one.command and ".keeper " not in one.command)
    os.kill(next(victims).pid, signal.SIGKILL)
    told = await asyncio.wait_for(lost, 60)
    assert [one for one in running() if one.group == api.group] == []
    assert not await engines.rollout.health()
    return told


async def test_set_up_wrongly_it_serves_and_says_what_to_mend(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    endpoint = await engines.up("--logprobs-mode=raw_logprobs", "--no-enable-auto-tool-choice")
    assert "--logprobs-mode processed_logprobs" in (endpoint.refusal or "")
    assert "VLLM_SERVER_DEV_MODE=1" in (endpoint.refusal or "")
    found = json.loads((engines.run_dir / "engine_probes.json").read_text())
    mended = {verdict["name"]: verdict["mend"] for verdict in found if not verdict["ok"]}
    assert mended["tool calls"] == "--enable-auto-tool-choice --tool-call-parser hermes"
    async with app(endpoint) as session:
        assert (await ask(session, endpoint, QUESTIONS[0])).ids
