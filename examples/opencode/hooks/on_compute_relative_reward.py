"""Reward of each sibling's answer: 1 if the task's test would pass after the answer, else 0.

No tool call is executed here. In memory, the hook adds the files that the answer would write to the
files that the session has written. If the file was already right before the answer, only a closing
message in words gets reward 1. A broken tool call does not count as a closing message. Otherwise
the model would learn to write broken calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

Json = dict[str, Any]
Files = dict[str, str]

TASKS = Path(__file__).parents[1] / "tasks.jsonl"


def load_tests() -> dict[str, Json]:
    """Return the rows of the task file by their question."""
    lines = TASKS.read_text().splitlines()
    return {row["question"]: row for row in map(json.loads, lines)}


TESTS = load_tests()


def on_compute_relative_reward(
    valid_results: Sequence[Any], all_answers: list[Json], question: str
) -> list[float | None]:
    row = TESTS.get(question.strip().strip('"'))
    if row is None:
        return [None] * len(
            all_answers
        )  # not a task of the dataset: serve the request, do not train it
    before = written_files(valid_results[0].messages)
    return [score(before, answer, row) for answer in all_answers]


def score(before: Files, answer: Json, row: Json) -> float:
    """Return the reward of one answer, and add `passes` to the answer for the ledger.

    The test must pass after the answer. If the file was right before the answer, the answer must
    also end the turn. If the file was wrong, the answer must write the right file.
    """
    calls = list(calls_in(answer))
    after = before | dict(files_from(calls))
    answer["passes"] = after.get(row["file"], "").strip() == row["content"]
    is_closing = not calls and answer["finish_reason"] == "stop" and is_plain(answer["content"])
    was_right = before.get(row["file"], "").strip() == row["content"]
    return float(answer["passes"] and is_closing == was_right)


def is_plain(text: str | None) -> bool:
    """Return whether a text has words and no part of a broken tool call."""
    return bool(text) and "tool_call>" not in text and not set("{}") & set(text)


def written_files(messages: Sequence[Json]) -> Files:
    """Return the contents that the session has written so far, by file name."""
    calls = [call for message in messages for call in calls_in(message)]
    return dict(files_from(calls))


def calls_in(message: Json) -> Iterator[Json]:
    """Yield name and arguments of each tool call of a message."""
    calls: list[Json] = message.get("tool_calls") or []
    return (call["function"] for call in calls)


def files_from(calls: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """Yield (file name, content) of each complete `write` call. Skip all other calls."""
    for call in calls:
        try:
            arguments: Any = json.loads(call["arguments"])
            if call["name"] == "write":
                yield PurePosixPath(arguments["filePath"]).name, str(arguments["content"])
        except (ValueError, KeyError, TypeError):
            continue
