"""Calls of a request whose arm has a policy of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from fakevllm.groups.sampler import Sampler
from fakevllm.release.arms import Arm
from fakevllm.transport.app_response import AppResponse
from fakevllm.transport.engine_client import EngineClient, LiveResponse
from fakevllm.transport.request import Request, SiblingPlan, sibling_headers
from fakevllm.transport.request_arm import LOST, PolicyGone, RequestArm, check_policy, with_policy
from fakevllm.transport.retry_handler import RetryHandler
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.model_name import RenamingExchange
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.swarm import ARM_HEADER, SIBLING_HEADER

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def make_request(arm: RequestArm | None) -> Request:
    raw = orjson.dumps(BODY)
    adapter = ADAPTERS["chat"]
    exchange = adapter.open(dict(BODY), EngineInfo())
    return Request("r1", adapter, raw, raw, exchange, {"X-Request-Id": "q"}, arm=arm)


def baseline(troubles: list[str | None] | None = None) -> RequestArm:
    """Return the baseline, whose reloads end with these troubles."""
    outcomes = iter(troubles or [])

    async def reload(arm: RequestArm) -> str | None:
        assert arm.arm is Arm.BASELINE
        return next(outcomes)

    return RequestArm(Arm.BASELINE, 0.1, "root", policy="policy-0", reload=reload)


def models(request: Request) -> list[str]:
    plan = SiblingPlan(3, [{}, {"model": "other"}, {}], seed=5)
    bodies = [plan.body(request, index, 1.0) for index in range(3)]
    bodies.append(plan.lead_request(request).upstream_body)
    return [orjson.loads(body)["model"] for body in bodies]


def test_calls_of_the_baseline_name_the_policy_and_no_sibling() -> None:
    request = make_request(baseline())
    assert models(request) == ["policy-0"] * 4
    assert sibling_headers(request, 0) == {"X-Request-Id": "q", ARM_HEADER: "baseline"}
    assert sibling_headers(request, 2) == {"X-Request-Id": "q-2", ARM_HEADER: "baseline"}
    assert request.headers == {"X-Request-Id": "q"}
    assert request.body["model"] == "m" and not request.is_captured


def test_calls_of_the_training_arm_name_their_sibling_and_the_arm() -> None:
    request = make_request(RequestArm(Arm.TRAINING, 0.9, "root"))
    assert request.is_captured and models(request) == ["m", "other", "m", "m"]
    headers = sibling_headers(request, 1)
    assert (headers[SIBLING_HEADER], headers[ARM_HEADER]) == ("r1/1", "training")
    assert ARM_HEADER not in sibling_headers(make_request(None), 1)


def test_a_request_that_the_served_weights_answer_in_place_of_its_arm_is_not_captured() -> None:
    arm = baseline()
    request = make_request(arm)
    arm.use_served_weights("gone")
    assert models(request) == ["m", "other", "m", "m"]
    assert sibling_headers(request, 0)[ARM_HEADER] == "training"
    assert SIBLING_HEADER not in sibling_headers(request, 0) and not request.is_captured


@pytest.mark.parametrize(
    ("troubles", "known_after", "policies", "trouble"),
    [
        ([None], 1, ["policy-0", "policy-0"], None),
        (["no server"], 9, ["policy-0", None], "no server"),
        ([None], 9, ["policy-0", "policy-0", None], LOST),
    ],
)
async def test_a_policy_that_is_gone_is_loaded_again_or_the_served_weights_answer(
    troubles: list[str | None], known_after: int, policies: list[str | None], trouble: str | None
) -> None:
    arm = baseline(troubles)
    called: list[str | None] = []

    async def call() -> str:
        called.append(arm.policy)
        check_policy(arm, 404 if len(called) <= known_after else 200)
        return "answer"

    assert await with_policy(arm, call) == "answer"
    assert (called, arm.trouble) == (policies, trouble)
    assert arm.answering is (Arm.BASELINE if trouble is None else Arm.TRAINING)


async def test_a_404_of_the_served_weights_is_the_apps() -> None:
    check_policy(None, 404)
    check_policy(RequestArm(Arm.TRAINING, 1.0, "root"), 404)
    with pytest.raises(PolicyGone):
        check_policy(baseline(), 404)


class ForgetfulEngine(EngineClient):
    """An engine that does not know policies until they are loaded again."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.known = {"m"}
        self.models: list[str] = []

    @asynccontextmanager
    async def live(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[LiveResponse]:
        model = orjson.loads(body)["model"]
        self.models.append(model)
        if model not in self.known:
            yield LiveResponse(404, [], False, _once(b'{"error": {"message": "no"}}'))
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}}
        answer = {"id": "1", "model": model, "choices": [choice | {"finish_reason": "stop"}]}
        yield LiveResponse(200, [], False, _once(orjson.dumps(answer)))


async def _once(chunk: bytes) -> AsyncGenerator[bytes]:
    yield chunk


@pytest.mark.parametrize("is_loaded_again", [True, False])
@pytest.mark.parametrize("has_siblings", [True, False])
async def test_the_app_gets_an_answer_with_its_own_name_if_the_policy_is_gone(
    is_loaded_again: bool, has_siblings: bool
) -> None:
    engine = ForgetfulEngine()
    sent: list[MutableMapping[str, Any]] = []

    async def reload(arm: RequestArm) -> str | None:
        if not is_loaded_again:
            return "no server"
        engine.known.add("policy-0")
        return None

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    arm = RequestArm(Arm.BASELINE, 0.1, "root", policy="policy-0", reload=reload)
    request = make_request(arm)
    assert request.exchange is not None
    request.exchange = RenamingExchange(request.exchange, "m")
    handler = RetryHandler(engine)
    async with AppResponse(send, request.adapter, request.exchange) as app:
        if has_siblings:
            sampler = Sampler(engine, handler, 1.0)
            await sampler.relay(request, SiblingPlan(2), app, lambda: None)
        else:
            await handler.relay(request, app)
    await engine.close()
    assert engine.models == ["policy-0", "policy-0" if is_loaded_again else "m"]
    assert sent[0]["status"] == 200
    body = b"".join(message.get("body", b"") for message in sent)
    assert orjson.loads(body)["model"] == "m"
    assert arm.trouble == (None if is_loaded_again else "no server")
