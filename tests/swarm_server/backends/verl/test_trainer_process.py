"""What the trainer's process says about workers that cannot be started."""

from __future__ import annotations

import argparse

import pytest

from fakevllm_server.backends.verl import __main__ as process
from fakevllm_server.types.backend import BackendRefused

OPTIONS = argparse.Namespace(num_workers=4, min_workers=2)


def test_with_too_few_gpus_the_lost_nodes_and_the_remedies_are_named() -> None:
    message = (
        "^4 workers do not fit: .* nodes are 1; lower .*; the cause may be that Ray nodes "
        "10.0.0.2, 10.0.0.3 are dead or do not answer: start Ray there again, or lower "
        "cluster.min_training_gpus, "
    )
    with pytest.raises(BackendRefused, match=message):
        process.place_or_name_lost_nodes([1], ["10.0.0.2", "10.0.0.3"], OPTIONS)
    with pytest.raises(BackendRefused, match=r"^4 workers do not fit: .*; lower [^;]*$"):
        process.place_or_name_lost_nodes([1], [], OPTIONS)


def test_fewer_workers_than_usual_are_one_line_that_names_the_lost_nodes() -> None:
    lost = ["10.0.0.4"]
    assert process.place_or_name_lost_nodes([1, 1, 1], lost, OPTIONS) == [1, 1, 1]
    start = "trains with 3 of 4 workers, because no more fit on the GPUs of the Ray cluster"
    note = process.start_note([1, 1, 1], 4, lost)
    cause = "Ray node 10.0.0.4 is dead or does not answer"
    assert note is not None and note.startswith(f"{start} ({cause}); more are used ")
    note = process.start_note([1, 1, 1], 4, [])
    assert note is not None and note.startswith(f"{start}; more are used ")
    assert process.start_note([2, 2], 4, lost) is None
