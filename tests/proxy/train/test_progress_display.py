"""The progress bar of a run."""

from __future__ import annotations

import io

from rich.console import Console

from fakevllm.train.progress_display import ProgressDisplay


def test_the_bar_of_a_resumed_run_begins_at_the_steps_of_earlier_runs() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with ProgressDisplay(console, 20) as display:
        display.show_earlier_steps(5)
        display.show_phase("training")
    last_drawing = output.getvalue().rpartition("training")[2]
    assert "step 5 of 20" in last_drawing
