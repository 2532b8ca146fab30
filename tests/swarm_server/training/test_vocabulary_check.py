"""Token ids outside of the model's vocabulary are refused before they reach the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.training.vocabulary_check import check_ids, read_vocab_size
from fakevllm_server.web.app import create_app


def test_ids_of_the_vocabulary_are_accepted_and_all_others_refused() -> None:
    first, last = replace(call(), prompt_ids=[0]), replace(call(), response_ids=[99])
    check_ids([first, last], 100)
    with pytest.raises(ValueError, match="token id 99 is outside of the model's vocabulary of 99"):
        check_ids([first, last], 99)
    with pytest.raises(ValueError, match="token id -1 is negative"):
        check_ids([replace(call(), prompt_ids=[3, -1])], None)
    check_ids([replace(call(), prompt_ids=[2**31 - 1]), replace(call(), prompt_ids=[])], None)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 7}', 7),
        ('{"vocab_size": 7, "text_config": {"vocab_size": 9}}', 9),
        ('{"vocab_size": "7"}', None),
        ('{"text_config": 3}', None),
        ("[]", None),
        ("no JSON", None),
    ],
)
def test_the_size_of_the_vocabulary_is_in_the_model_folder(
    config: str, size: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert read_vocab_size(str(tmp_path)) == size


def test_a_model_without_a_folder_has_an_unknown_vocabulary(tmp_path: Path) -> None:
    assert read_vocab_size(None) is None
    assert read_vocab_size(str(tmp_path / "hub-name")) is None


async def test_samples_edits_and_logged_groups_with_other_ids_are_refused(tmp_path: Path) -> None:
    size = json.loads((DEMO_MODEL_DIR / "config.json").read_text())["vocab_size"]
    app = create_app(ServerConfig("embedded", tmp_path, model=str(DEMO_MODEL_DIR)))
    swarm = app.state.server
    swarm.job = TrainJob(batch_size=64, loss="sft")
    async with swarm.engine_lock:
        await swarm.start_engine()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def send(path: str, body: dict[str, Any]) -> httpx.Response:
            return await client.post(path, json={"run_id": swarm.run_id} | body)

        def bodies(name: str, ids: Sequence[int]) -> dict[str, dict[str, Any]]:
            logprobs = [-0.5] * len(ids)
            one = replace(call(), prompt_ids=ids, response_ids=ids[:2], logprobs=logprobs[:2])
            wire = one.to_wire().model_dump(mode="json")
            edit = {"kind": "plain", "prompt_ids": pack_ids([1]), "response_ids": pack_ids(ids)}
            return {
                "/add_sample": {"sample_id": f"s{name}", "advantage": 0.5, "calls": [wire]},
                "/add_demonstration": {"sample_id": f"d{name}", "demonstrations": [edit]},
                "/add_logged_group": {
                    "group_id": f"l{name}",
                    "rewards": [1.0, 0.0],
                    "calls": [[wire], [wire]],
                },
            }

        for path, body in bodies("bad", [1, 2, size]).items():
            refused = await send(path, body)
            assert refused.status_code == 422
            assert f"the token id {size} is outside of the model's" in refused.json()["detail"]
        assert swarm.pool.num_finished == 0
        for path, body in bodies("good", [1, 2, size - 1]).items():
            accepted = await send(path, body)
            assert accepted.status_code == 200 and accepted.json()["success"], accepted.text
        assert swarm.pool.num_finished == 3
    await swarm.close()
