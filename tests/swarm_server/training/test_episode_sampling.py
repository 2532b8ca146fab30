"""Calls of an active client's episode get the job's token limit and temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.training.episode_sampling import with_job_sampling
from tests.swarm_server.web.planned_engine import (
    AppCall,
    PlannedEngine,
    answers_whole,
    start_server,
)

Json = dict[str, Any]

LENGTHS: Json = {
    "max_prompt_length": 20,
    "max_response_length": 40,
    "max_response_length_in_one_turn": 30,
    "max_model_len": 60,
}
CHAT: Json = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({}, {"max_tokens": 30}),
        ({"max_tokens": None}, {"max_tokens": 30}),
        ({"max_tokens": 31}, {"max_tokens": 30}),
        ({"max_tokens": "31"}, {"max_tokens": 30}),
        ({"max_tokens": 31.0}, {"max_tokens": 30}),
        ({"max_tokens": 29}, {"max_tokens": 29}),
        ({"max_completion_tokens": 99}, {"max_completion_tokens": 30}),
        (
            {"max_tokens": 5, "max_completion_tokens": 99},
            {"max_tokens": 5, "max_completion_tokens": 30},
        ),
        ({"max_tokens": "many"}, {"max_tokens": "many"}),
        ({"max_tokens": True}, {"max_tokens": True}),
        ({"max_tokens": -1}, {"max_tokens": -1}),
    ],
)
def test_the_token_limit_is_capped_by_the_limit_per_turn(requested: Json, expected: Json) -> None:
    assert with_job_sampling(CHAT | requested, TrainJob(**LENGTHS)) == CHAT | expected


@pytest.mark.parametrize(("turn", "limit"), [(30, 16), (8, 8)])
def test_a_completion_without_a_token_limit_keeps_the_default_of_its_format(
    turn: int, limit: int
) -> None:
    job = TrainJob.model_validate(LENGTHS | {"max_response_length_in_one_turn": turn})
    assert with_job_sampling({"prompt": "hi"}, job) == {"prompt": "hi", "max_tokens": limit}


def test_a_job_without_sampling_settings_leaves_the_body_unchanged() -> None:
    body = CHAT | {"max_tokens": 5000}
    assert with_job_sampling(body, TrainJob()) is body
    bounded = CHAT | {"max_tokens": 3, "temperature": 0.2}
    assert with_job_sampling(bounded, TrainJob(**LENGTHS, temperature=0.9)) is bounded


@pytest.mark.parametrize(("requested", "expected"), [(None, 0.9), (0.0, 0.0), (1.0, 1.0)])
def test_the_jobs_temperature_applies_to_calls_without_one(
    requested: float | None, expected: float
) -> None:
    sent = with_job_sampling(CHAT | {"temperature": requested}, TrainJob(temperature=0.9))
    assert sent["temperature"] == expected


async def test_only_calls_of_episodes_get_the_jobs_sampling_settings(tmp_path: Path) -> None:
    async with PlannedEngine(tmp_path, answers_whole, answers_whole, answers_whole) as engine:
        swarm = await start_server(tmp_path, engine)
        swarm.job = TrainJob(**LENGTHS, temperature=0.9)
        episode = await swarm.intake.claim("client", "train", 60.0)
        headers = {"Authorization": f"Bearer {episode.key}"}
        for path in ("/v1/chat/completions", "/v1/messages"):
            call = AppCall(swarm, {"max_tokens": 50}, path=path, headers=headers)
            assert (await call.answered()).status == 200
        await AppCall(swarm, {"max_tokens": 50}).answered()
        await swarm.close()
    limits = [(body.get("max_tokens"), body.get("temperature")) for body in engine.bodies]
    assert limits == [(30, 0.9), (30, 0.9), (50, None)]
