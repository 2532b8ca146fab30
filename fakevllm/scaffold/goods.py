"""The kinds of rewards that `fakevllm init` can set up. A kind decides which answers are good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GoodName = Literal["exact", "format", "judge", "thumbs", "command"]

REWARD_HOOK = "hooks/on_compute_relative_reward.py"
"""Path of the reward hook in the written folder."""


@dataclass(frozen=True, slots=True)
class Good:
    """A kind of reward, with its hook. All its other files are in `templates/good/NAME/`."""

    ready_hook: str
    """Name of the file in the package `reward_hooks` that is copied."""
    path: str = REWARD_HOOK
    """Path of the copy in the written folder."""
    edits: tuple[tuple[str, str], ...] = ()
    """Pairs of a text in the ready hook and the text that replaces it in the copy."""


GOODS: dict[GoodName, Good] = {
    "exact": Good(
        "exact_match.py",
        edits=(
            (
                r'''r"####\s*(.+)|\\boxed\{([^{}]*)\}|[Aa]nswer\s*(?:is|:|=)\s*(.+)"''',
                r'''r"-?\d[\d,]*(?:\.\d+)?"''',
            ),
        ),
    ),
    "format": Good(
        "length_format.py",
        edits=((r'''r"(?s).*\bAnswer: \S.*"''', r'''r"(?s).*\d\.?\s*"'''),),
    ),
    "judge": Good("llm_judge.py", path="hooks/llm_judge.py"),
    "thumbs": Good("user_feedback.py"),
    "command": Good(
        "run_command.py",
        edits=(("Path(__file__).resolve().parent /", "Path(__file__).resolve().parents[1] /"),),
    ),
}
