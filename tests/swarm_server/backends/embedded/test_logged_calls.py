"""The embedded trainer weighs the tokens of an earlier run under the distribution that sampled
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from swarm_server.backends.embedded.engine_helpers import EngineMaker
from swarm_server.backends.embedded.train.test_trainer import sampled_calls
from swarm_server.local_backend import LocalBackend

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.training.logged_groups import weigh_logged_calls
from fakevllm_server.types.backend import Batch
from fakevllm_server.types.calls import LOGGED_VERSION


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_tokens_that_the_same_weights_sampled_have_the_weight_one_at_any_temperature(
    make_engine: EngineMaker,
    tiny_folder: Path,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, trainer = make_engine(), LocalBackend()
    await engine.boot(TrainJob())
    monkeypatch.setattr(trainer, "log_probs", engine.log_probs)
    calls = [
        replace(call, version=LOGGED_VERSION) for call in sampled_calls(tiny_folder, temperature)
    ]
    weighed = await weigh_logged_calls(trainer, Batch(1, calls), TrainJob())
    assert weighed.metrics["logged_weight"] == pytest.approx(1.0, abs=1e-4)
    assert weighed.metrics["logged_ess"] == pytest.approx(1.0, abs=1e-4)
