"""Hook folders for tests."""

from __future__ import annotations

from pathlib import Path

PREFER_YES = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float((answer["content"] or "").startswith("yes")) for answer in all_answers]
"""


def write_hooks(folder: Path, reward: str, submit: str | None = None) -> Path:
    """Write the hook files, and return the folder for `--hooks`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "on_compute_relative_reward.py").write_text(reward)
    if submit is not None:
        (folder / "on_user_submit_new_requests.py").write_text(submit)
    return folder
