from __future__ import annotations

import math

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends.base import Batch, Call, LossSpec
from fakevllm_server.backends.fake import EOS, FakeEngine


async def test_an_answer_that_begins_with_the_end_token_can_be_trained() -> None:
    engine = FakeEngine()
    job = TrainJob(lr=0.1)
    await engine.boot(job)
    calls = [Call("g", [1], [EOS], [-0.5], 0, temperature=0.01, advantage=1.0, weight=1.0)]
    metrics = await engine.step(Batch(1, calls), LossSpec.of(job))
    assert math.isfinite(metrics["theta"])
