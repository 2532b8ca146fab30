"""Contract tests of the engines that hold several sets of weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract.rollouts import CHAT, Json, Rig, logprobs_of, user

from fakevllm_server.backends.http.policies import MAX_POLICIES
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.types.backend import ActionFailed, BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec

ENGINES = [
    "fake",
    "embedded",
    pytest.param("vllm_lora", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
]
GREEDY: Json = {"temperature": 0, "logprobs": True, "return_token_ids": True}
LONG = "Please answer this question in your own words, and do not use more than ten of them. "


pytestmark = pytest.mark.asyncio(loop_scope="package")
numbers = itertools.count(100)


@pytest_asyncio.fixture(loop_scope="package")
async def rig(shared_rig: Rig) -> AsyncGenerator[Rig]:
    """An engine with its first weights and without policies."""
    await shared_rig.rollout.load_weights(shared_rig.folders[0], 0)
    yield shared_rig
    for name in await shared_rig.rollout.policies():
        await shared_rig.rollout.unload_policy(name)
    await shared_rig.rollout.load_weights(shared_rig.folders[0], 0)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy whose name no other test has used, because names are never reused."""

    version: int = field(default_factory=lambda: next(numbers))

    @property
    def name(self) -> str:
        return f"policy-{self.version}"

    async def load(self, rig: Rig, folder: Path) -> None:
        await rig.rollout.load_policy(self.name, folder, self.version)


Tokens = list[tuple[str, float]]


async def greedy(rig: Rig, model: str, question: str | None = None) -> Tokens:
    """Return the tokens of the greedy answer with their log-probabilities."""
    messages = None if question is None else user(question)
    body = GREEDY | {"model": model} | ({} if messages is None else {"messages": messages})
    answer = await rig.send(body)
    assert answer.status == 200 and answer.json["model"] == model, answer.json
    return [(one["token"], one["logprob"]) for one in logprobs_of(answer.json["choices"][0])]


def are_alike(one: Tokens, other: Tokens) -> bool:
    """Return True if two answers have the same tokens, and equal log-probabilities but for the
    rounding of a cached prompt or of a batch."""
    return [token for token, _ in one] == [token for token, _ in other] and all(
        first == pytest.approx(second, abs=1e-4)
        for (_, first), (_, second) in zip(one, other, strict=True)
    )


async def status_for(rig: Rig, model: str) -> int:
    return (await rig.send(GREEDY | {"model": model})).status


async def test_an_engine_answers_with_the_weights_that_the_models_name_selects(rig: Rig) -> None:
    initial, other = rig.folders
    old, new = Policy(), Policy()
    assert rig.endpoint.holds_policies
    base = await greedy(rig, "contract")
    await old.load(rig, initial)
    await new.load(rig, other)
    assert await rig.rollout.policies() == {old.name: old.version, new.name: new.version}
    assert are_alike(await greedy(rig, old.name), base)
    changed = await greedy(rig, new.name)
    assert not are_alike(changed, base)
    await rig.rollout.load_weights(other, 7)
    assert are_alike(await greedy(rig, "contract"), changed)
    assert are_alike(await greedy(rig, old.name), base)


async def test_cached_prompts_belong_to_one_policy(rig: Rig) -> None:
    policy = Policy()
    await policy.load(rig, rig.folders[1])
    question = LONG + rig.abilities.question
    first = await greedy(rig, policy.name, question)
    base = await greedy(rig, "contract", question)
    assert not are_alike(base, first)
    for model, expected in ((policy.name, first), ("contract", base)) * 2:
        assert are_alike(await greedy(rig, model, question), expected)


async def test_policies_answer_at_the_same_time(rig: Rig) -> None:
    old, new = Policy(), Policy()
    await old.load(rig, rig.folders[0])
    await new.load(rig, rig.folders[1])
    names = ["contract", old.name, new.name]
    alone = {name: await greedy(rig, name) for name in names}
    answers = await asyncio.gather(*(greedy(rig, name) for name in names * 3))
    for name, answer in zip(names * 3, answers, strict=True):
        assert are_alike(answer, alone[name])


async def test_a_token_has_the_version_of_its_policy(rig: Rig) -> None:
    policy = Policy()
    await rig.rollout.load_weights(rig.folders[1], 9)
    await policy.load(rig, rig.folders[1])
    by_model = {"contract": 9} | ({policy.name: policy.version} if not rig.is_vllm else {})
    for model, version in by_model.items():  # the server knows the version of a policy's call
        answer = await rig.capture({"model": model})
        assert {span.version for span in answer.record.versions} == {version}


async def test_the_models_list_names_the_policies(rig: Rig) -> None:
    policy = Policy()
    await policy.load(rig, rig.folders[1])
    async with rig.http.get("/v1/models") as answer:
        cards = (await answer.json())["data"]
    listed = [(card["id"], card["parent"]) for card in cards]
    if rig.endpoint.gate.adapter is not None:  # the served weights are an adapter too
        listed.remove((rig.endpoint.gate.adapter, "contract"))
    assert listed == [("contract", None), (policy.name, "contract")]


async def test_an_unloaded_policy_is_an_unknown_model(rig: Rig) -> None:
    policy = Policy()
    assert await status_for(rig, policy.name) == 404
    await policy.load(rig, rig.folders[1])
    assert await status_for(rig, policy.name) == 200
    await rig.rollout.unload_policy(policy.name)
    assert await status_for(rig, policy.name) == 404
    assert await rig.rollout.policies() == {}
    await rig.rollout.unload_policy(policy.name)


async def test_a_running_request_outlives_its_policy(rig: Rig) -> None:
    policy = Policy()
    await policy.load(rig, rig.folders[1])
    body: Json = {
        "model": policy.name,
        "messages": user(rig.abilities.endless),
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    async with rig.http.post(CHAT, json=rig.body(body)) as answer:
        await answer.content.readuntil(b"\n\n")
        await rig.rollout.unload_policy(policy.name)
        rest = await answer.read()
    assert b'"finish_reason":"length"' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert await status_for(rig, "contract") == 200


async def test_a_name_stands_for_one_version_forever(rig: Rig) -> None:
    policy, other = Policy(), rig.folders[1]
    refusal = f"{policy.name} stands for version {policy.version}"
    await policy.load(rig, other)
    await policy.load(rig, other)
    with pytest.raises(ActionFailed, match=refusal):
        await rig.rollout.load_policy(policy.name, other, 8)
    await rig.rollout.unload_policy(policy.name)
    with pytest.raises(ActionFailed, match=refusal):
        await rig.rollout.load_policy(policy.name, other, 8)
    await policy.load(rig, other)
    with pytest.raises(ActionFailed, match="contract belongs to the weights that are trained"):
        await rig.rollout.load_policy("contract", other, 7)


async def test_the_number_of_policies_has_a_limit(rig: Rig) -> None:
    *policies, last = [Policy() for _ in range(MAX_POLICIES + 1)]
    for policy in policies:
        await policy.load(rig, rig.folders[0])
    with pytest.raises(ActionFailed, match="unload one of them"):
        await last.load(rig, rig.folders[0])
    await rig.rollout.unload_policy(policies[0].name)
    await last.load(rig, rig.folders[0])


async def test_a_folder_without_weights_loads_nothing(rig: Rig, tmp_path: Path) -> None:
    policy = Policy()
    with pytest.raises(ActionFailed):
        await policy.load(rig, tmp_path / "nowhere")
    assert await rig.rollout.policies() == {}
    await rig.rollout.load_policy(policy.name, rig.folders[1], policy.version + 1000)


async def test_vllm_refuses_policies_in_one_line(tmp_path: Path) -> None:
    vllm: Any = VllmRollout(EngineSpec("vllm", tmp_path, "model", "contract"))
    with pytest.raises(BackendRefused, match="one set of full weights"):
        await vllm.load_policy("policy-7", tmp_path, 7)
    assert await vllm.policies() == {}
