"""Training with shared prefixes on verl's workers gives the results of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swarm_server.backends.torch_forest.tiny_models import llama
from swarm_server.backends.verl.rank_processes import run_ranks

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

pytestmark = [pytest.mark.real]

TOLERANCE = 1e-5


def results_of(num_workers: int, folder: Path, max_logits: int) -> dict[str, dict[str, float]]:
    """Run `forest_pass` on `num_workers` workers, and return its results."""
    module = "swarm_server.backends.verl.forest_pass"
    printed = run_ranks(num_workers, module, str(folder), str(max_logits))
    return json.loads(printed.splitlines()[-1])


def assert_equal_results(results: dict[str, dict[str, Any]]) -> None:
    for batch, values in results.items():
        assert values.pop("rho") > 1.5, batch
        assert values.pop("pieces") >= 1
        values.pop("padding")
        assert len(values) == 6
        for name, difference in values.items():
            assert difference < TOLERANCE, (batch, name)


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_rows_and_shared_prefixes_train_alike(num_workers: int) -> None:
    results = results_of(num_workers, DEMO_MODEL_DIR, 2**26)

    assert results["siblings and turns"]["pieces"] > min(num_workers, 3)
    if num_workers > 1:
        assert results["siblings and turns"]["padding"] > 0
        # The second worker has a piece of padding rows only.
        assert results["two equal calls"]["pieces"] == num_workers
        assert results["two equal calls"]["padding"] == 2 * (num_workers - 1)
    assert_equal_results(results)


def test_a_divided_lm_head_trains_alike_if_workers_have_different_numbers_of_chunks(
    tmp_path: Path,
) -> None:
    model = llama(vocab_size=512, tie_word_embeddings=False, initializer_range=0.1)
    model.save_pretrained(tmp_path)

    assert_equal_results(results_of(2, tmp_path, 512 * 3))
