"""The embedded trainer sends its weights in chunks to the Unix socket of a simulated vLLM."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import load, load_file

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer
from fakevllm_server.backends.vllm.simulated_vllm import Fault, SimulatedVllm
from fakevllm_server.backends.weight_transfer.weight_source import (
    ConvertedWeights,
    check_names,
    in_chunks,
)
from fakevllm_server.types.backend import BackendError, BackendRefused
from fakevllm_server.types.weight_transfer import JSON, TransferTarget

MAX_CHUNK_BYTES = 200_000


@pytest.fixture
def trainer() -> StandaloneTrainer:
    return StandaloneTrainer(DEMO_MODEL_DIR, seed=0, device="cpu", dtype="float32", torch_threads=1)


@asynccontextmanager
async def simulated(path: Path, *faults: Fault) -> AsyncGenerator[SimulatedVllm]:
    vllm = SimulatedVllm(path.parent, faults=faults)
    runner = web.AppRunner(vllm.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield vllm
    finally:
        await runner.cleanup()


def received(vllm: SimulatedVllm) -> list[dict[str, torch.Tensor]]:
    return [load(base64.b64decode(update)) for update in vllm.updates]


async def test_all_weights_arrive_under_the_names_of_the_model_folder(
    tmp_path: Path, trainer: StandaloneTrainer
) -> None:
    target = TransferTarget(str(tmp_path / "s"), JSON, max_chunk_bytes=MAX_CHUNK_BYTES)
    await trainer.export(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    async with simulated(Path(target.socket)) as vllm:
        await trainer.send_weights(target)
        chunks = received(vllm)
        arrived = {name: weight for chunk in chunks for name, weight in chunk.items()}
        assert arrived.keys() == exported.keys()
        assert all(torch.equal(arrived[name], exported[name]) for name in exported)
        assert len(chunks) > 10
        for chunk in chunks:
            assert len(chunk) == 1 or sum(w.nbytes for w in chunk.values()) <= MAX_CHUNK_BYTES
        await trainer.send_weights(target)
    assert vllm.control_requests.count("init_weight_transfer_engine") == 1
    assert vllm.control_requests.count("finish_weight_update") == 2


async def test_a_new_vllm_is_initialized_again(tmp_path: Path, trainer: StandaloneTrainer) -> None:
    for name in ("first", "second"):
        async with simulated(tmp_path / name) as vllm:
            await trainer.send_weights(TransferTarget(str(tmp_path / name), JSON))
        assert vllm.control_requests[0] == "init_weight_transfer_engine"
        assert len(received(vllm)) == 1


async def test_a_refused_chunk_ends_the_transfer_with_vllms_reason(
    tmp_path: Path, trainer: StandaloneTrainer
) -> None:
    async with simulated(tmp_path / "s", Fault.TRANSFERS_FAIL) as vllm:
        with pytest.raises(BackendError, match=r"failed in update_weights \(HTTP 500\).*shapes d"):
            await trainer.send_weights(TransferTarget(str(tmp_path / "s"), JSON))
    assert vllm.control_requests[-1] == "update_weights"


async def test_a_vllm_that_is_gone_is_an_error_that_names_the_route(
    tmp_path: Path, trainer: StandaloneTrainer
) -> None:
    with pytest.raises(BackendError, match="did not answer init_weight_transfer_engine"):
        await trainer.send_weights(TransferTarget(str(tmp_path / "gone"), JSON))


def test_weights_with_other_names_than_in_the_folder_are_refused() -> None:
    with pytest.raises(BackendRefused, match=r"such as experts\.0: .* --weight-transport folder"):
        check_names(["experts.0"], DEMO_MODEL_DIR)


def test_weights_are_sent_in_the_type_of_the_export() -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    shapes = {name: weight.shape for name, weight in weights.items()}
    source = ConvertedWeights(weights, shapes, torch.bfloat16)
    assert [weight.dtype for _, weight in source] == [torch.bfloat16] * 2
    metadata = [(one.name, one.shape, one.num_bytes) for one in source.metadata()]
    assert metadata == [("a", (2, 3), 12), ("b", (4,), 8)]
    assert [list(chunk) for chunk in in_chunks(source, 12)] == [["a"], ["b"]]
    assert [list(chunk) for chunk in in_chunks(source, 20)] == [["a", "b"]]
