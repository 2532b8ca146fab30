"""The task's test, on each sibling's answer: 1 where the file it asks for would have the right
content, else 0.

No sibling's tool call is run here. The files that the session's calls have written, and those this
answer would write, are put together in memory. Once the file is right, the right thing to do is to
end the turn, in words: a call that nobody can read is none, or the model would come to like them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

Json = dict[str, Any]
Files = dict[str, str]

TASKS = Path(__file__).parents[1] / "tasks.jsonl"


def rows() -> dict[str, Json]:
    """By their question."""
    lines = TASKS.read_text().splitlines()
    return {row["question"]: row for row in map(json.loads, lines)}


TESTS = rows()


def on_compute_relative_reward(
    valid_results: Sequence[Any], all_answers: list[Json], question: str
) -> list[float | None]:
    row = TESTS.get(question.strip().strip('"'))
    if row is None:
        return [None] * len(all_answers)  # something else was asked: serve, do not train
    before = files_of(valid_results[0].messages)
    return [score(before, answer, row) for answer in all_answers]


def score(before: Files, answer: Json, row: Json) -> float:
    """The tests pass after this answer, and it does not go on once they do."""
    calls = list(calls_of(answer))
    after = before | dict(written(calls))
    answer["passes"] = after.get(row["file"], "").strip() == row["content"]  # kept in the ledger
    is_over = not calls and answer["finish_reason"] == "stop" and is_plain(answer["content"])
    was_right = before.get(row["file"], "").strip() == row["content"]
    return float(answer["passes"] and is_over == was_right)


def is_plain(text: str | None) -> bool:
    """Words, and no broken call among them."""
    return bool(text) and "tool_call>" not in text and not set("{}") & set(text)


def files_of(messages: Sequence[Json]) -> Files:
    """What the session has written so far, by the name of the file."""
    calls = [call for message in messages for call in calls_of(message)]
    return dict(written(calls))


def calls_of(message: Json) -> Iterator[Json]:
    calls: list[Json] = message.get("tool_calls") or []
    return (call["function"] for call in calls)


def written(calls: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """(file, content) of each whole `write`; anything else writes nothing."""
    for call in calls:
        try:
            arguments: Any = json.loads(call["arguments"])
            if call["name"] == "write":
                yield PurePosixPath(arguments["filePath"]).name, str(arguments["content"])
        except (ValueError, KeyError, TypeError):
            continue
