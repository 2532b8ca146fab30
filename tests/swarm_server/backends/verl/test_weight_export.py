"""The weights of a divided mixture of experts are written as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_server.backends.verl.rank_processes import run_ranks
from swarm_server.backends.verl.reference import have_same_weights, weights_in

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_experts_are_exported_with_names_of_their_own_whether_gathered_or_not(
    tmp_path: Path,
) -> None:
    run_ranks(2, "swarm_server.backends.verl.export_pass", str(tmp_path))

    assert "model.layers.1.mlp.experts.2.down_proj.weight" in weights_in(tmp_path / "expected")
    assert have_same_weights(tmp_path / "gathered", tmp_path / "expected")
    assert have_same_weights(tmp_path / "by_rows", tmp_path / "expected")
