"""What the trainer's process says about workers that cannot be started."""

from __future__ import annotations

import argparse

import pytest

from fakevllm_server.backends.verl import __main__ as process
from fakevllm_server.types.backend import BackendRefused

OPTIONS = argparse.Namespace(num_workers=4, min_workers=2)


def test_with_too_few_gpus_the_lost_nodes_and_the_remedies_are_named() -> None:
    message = (
        "^no answer from Ray nodes 10.0.0.2, 10.0.0.3: start Ray there again, or lower "
        "cluster.min_training_gpus, .* 4 workers do not fit: .* nodes are 1; lower "
    )
    with pytest.raises(BackendRefused, match=message):
        process.place([1], ["10.0.0.2", "10.0.0.3"], OPTIONS)
    with pytest.raises(BackendRefused, match=r"^4 workers do not fit"):
        process.place([1], [], OPTIONS)


def test_fewer_workers_than_usual_are_one_line_that_names_the_lost_nodes() -> None:
    assert process.place([1, 1, 1], ["10.0.0.4"], OPTIONS) == [1, 1, 1]
    start = "trains with 3 of 4 workers, because "
    note = process.start_note([1, 1, 1], 4, ["10.0.0.4"])
    assert note is not None and note.startswith(f"{start}there is no answer from Ray node 10.0.0.4")
    note = process.start_note([1, 1, 1], 4, [])
    assert note is not None and note.startswith(f"{start}the Ray cluster has no more GPUs; ")
    assert process.start_note([2, 2], 4, ["10.0.0.4"]) is None
