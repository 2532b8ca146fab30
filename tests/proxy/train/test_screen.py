"""What the terminal shows of a run."""

from __future__ import annotations

import io

from rich.console import Console

from fakevllm.train.screen import Screen


def test_a_run_that_goes_on_begins_with_the_steps_it_has() -> None:
    shown = io.StringIO()
    with Screen(Console(file=shown, force_terminal=True, width=100), 20) as screen:
        screen.begin(5)
        screen.phase("training")
    last = shown.getvalue().rpartition("training")[2]
    assert "step 5 of 20" in last
