"""Workers gather weights together, one of them sends the weights, and sending fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.verl.rank_processes import run_ranks
from swarm_server.backends.verl.reference import demo_model, have_same_weights, weights_in
from torch import Tensor

from fakevllm_server.backends.weight_transfer.weight_source import WeightSource
from fakevllm_server.types.backend import BackendError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_all_workers_finish_together_when_sending_succeeds_and_when_it_fails(
    tmp_path: Path,
) -> None:
    printed = run_ranks(2, "swarm_server.backends.verl.send_pass", str(tmp_path))

    assert json.loads(printed.splitlines()[-1]) == [None, None, None], "the first does not send"
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in weights_in(tmp_path / "sent")
    assert have_same_weights(tmp_path / "sent", tmp_path / "expected")


# Importing verl emits warnings about its own code.
@pytest.mark.filterwarnings("ignore")
def test_a_failed_gathering_is_no_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, the workers are out of step, and all of them must be started again."""
    from fakevllm_server.backends.verl import weight_sending
    from fakevllm_server.backends.verl.weight_export import FolderWeights

    num_gathered = 0

    def gather(weight: Tensor) -> Tensor:
        nonlocal num_gathered
        num_gathered += 1
        if num_gathered == 3:
            raise torch.OutOfMemoryError("raised by the test")
        return weight

    def receive(source: WeightSource) -> None:
        for _ in source:
            pass

    def hide_the_error(source: WeightSource) -> None:
        try:
            receive(source)
        except torch.OutOfMemoryError:
            raise BackendError("the code that sends failed") from None

    def weights() -> Any:
        return weight_sending.GatheredWeights(FolderWeights(demo_model(), torch.float32))

    def refuse(source: WeightSource) -> None:
        raise BackendError("refused by the test")

    monkeypatch.setattr(weight_sending, "gather", gather)
    for send in (receive, hide_the_error, None):
        num_gathered = 0
        with pytest.raises(torch.OutOfMemoryError, match=r"^raised by the test$"):
            weight_sending.send_together(weights(), send)
        assert num_gathered == 3
    monkeypatch.undo()
    assert weight_sending.send_together(weights(), receive) is None
    assert weight_sending.send_together(weights(), refuse) == "refused by the test"
