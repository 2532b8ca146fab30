"""1 for an answer that equals the task's reference, 0 for any other. Copy, edit the constants."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from fakevllm.hooks.spec import Json, Sibling

PATTERN: str | None = r"####\s*(.+)|\\boxed\{([^{}]*)\}|[Aa]nswer\s*(?:is|:|=)\s*(.+)"
"""Where the answer stands: the last match, its first group that took part. None: the whole text."""
JSON_FIELD: str | None = None
"""Instead of PATTERN: the answer is a JSON object, and this field of it counts."""
REFERENCE_FIELD = "answer"
"""Of the task's metadata. A task without it is not trained on."""
MUST_FINISH = True
"""An answer that was cut off, or that calls a tool, is wrong even where it matches."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    return [
        score(sibling, answer) for sibling, answer in zip(valid_results, all_answers, strict=True)
    ]


def score(sibling: Sibling, answer: Json) -> float | None:
    reference = sibling.task.metadata.get(REFERENCE_FIELD)
    if reference is None:
        return None
    found = extract(answer.get("content") or "")
    answer["extracted"] = found
    if found is None or (MUST_FINISH and answer["finish_reason"] != "stop"):
        return 0.0
    return float(normalised(found) == normalised(str(reference)))


def extract(text: str) -> str | None:
    """
    >>> extract("So 6 times 7 is 42.  Answer: 42.")
    '42.'
    """
    if JSON_FIELD is not None:
        return json_field(text, JSON_FIELD)
    if PATTERN is None:
        return text
    matches = list(re.finditer(PATTERN, text))
    if not matches:
        return None
    groups = matches[-1].groups() or (matches[-1].group(),)
    return next((group for group in groups if group is not None), None)


def json_field(text: str, name: str) -> str | None:
    """
    >>> json_field('```json\\n{"result": 42}\\n```', "result")
    '42'
    """
    start, end = text.find("{"), text.rfind("}")
    try:
        value: Any = json.loads(text[start : end + 1])
    except ValueError:
        return None
    found = cast(Json, value).get(name) if isinstance(value, dict) else None
    return None if found is None else found if isinstance(found, str) else json.dumps(found)


def normalised(text: str) -> str:
    """Numbers by value, other text without case, outer spaces and a full stop.

    >>> normalised(" $1,200.0. ") == normalised("1200"), normalised("Yes.")
    (True, 'yes')
    """
    plain = " ".join(text.split()).strip(" .*`$").casefold()
    try:
        return repr(float(plain.replace(",", "")))
    except ValueError:
        return plain
