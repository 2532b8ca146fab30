"""Calls of a request whose arm has a policy of its own."""

from __future__ import annotations

import orjson
import pytest

from fakevllm.release.arms import Arm
from fakevllm.transport.request import Request, SiblingPlan, sibling_headers
from fakevllm.transport.request_arm import LOST, PolicyGone, RequestArm, check_policy, with_policy
from fakevllm_adapters.formats.base import EngineInfo
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
