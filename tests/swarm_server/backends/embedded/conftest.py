"""Fixtures: engines, the shipped demo model, and a random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import EngineMaker, load
from swarm_server.backends.embedded.tiny_llama import save_tiny_llama

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama of two layers with untied embeddings and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[EmbeddedEngine]:
    """An engine shared by tests that do not change it. Tests that publish, load weights or train
    use `make_engine`."""
    engine = EmbeddedEngine(EngineConfig(DEMO_MODEL_DIR, "demo"))
    yield engine
    engine.close()


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[EngineMaker]:
    engines: list[EmbeddedEngine] = []

    def make(model: Path = tiny_folder, **settings: object) -> EmbeddedEngine:
        engines.append(EmbeddedEngine(EngineConfig(model, "tiny", **settings)))  # pyright: ignore[reportArgumentType]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return DEMO_MODEL_DIR


@pytest.fixture
def trainer(tiny_folder: Path) -> PolicyTrainer:
    """A trainer of all weights in float32, not booted."""
    return PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
