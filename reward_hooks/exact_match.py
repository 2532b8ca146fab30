"""Reward an answer with 1 if it equals the task's reference answer, else with 0.

Copy the file and edit the constants.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from fakevllm.hooks.spec import Json, Sibling

PATTERN: str | None = r"####\s*(.+)|\\boxed\{([^{}]*)\}|[Aa]nswer\s*(?:is|:|=)\s*(.+)"
"""Regex that finds the final answer in the text. If the regex matches several times, the last match
counts. The final answer is the first capture group that is set in this match. If PATTERN is None,
the whole text is the final answer."""
JSON_FIELD: str | None = None
"""Name of the field that contains the answer, if answers are JSON objects. If JSON_FIELD is set,
PATTERN is not used."""
REFERENCE_FIELD = "answer"
"""Field of the task's metadata that contains the reference answer. If a task has no such field, its
answers get no reward and are not trained."""
MUST_FINISH = True
"""Whether an answer that was cut off, or that calls a tool, counts as wrong even if the answer
equals the reference."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    return [
        score(sibling, answer) for sibling, answer in zip(valid_results, all_answers, strict=True)
    ]


def score(sibling: Sibling, answer: Json) -> float | None:
    """Return 1 for a correct answer and 0 for a wrong one. Return None if the task has no reference
    answer.

    The final answer that was found in the text is stored in the field `extracted` of `answer`, so
    that the ledger (the proxy's database) shows it.
    """
    reference = sibling.task.metadata.get(REFERENCE_FIELD)
    if reference is None:
        return None
    extracted = extract(answer.get("content") or "")
    answer["extracted"] = extracted
    if extracted is None or (MUST_FINISH and answer["finish_reason"] != "stop"):
        return 0.0
    return float(normalise(extracted) == normalise(str(reference)))


def extract(text: str) -> str | None:
    """Return the final answer that a text contains, or None if the text has no final answer.

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
    """Find the JSON object in a text, and return its field `name` as a string. Return None if the
    text has no JSON object, or if the object lacks the field.

    >>> json_field('```json\\n{"result": 42}\\n```', "result")
    '42'
    """
    start, end = text.find("{"), text.rfind("}")
    try:
        content: Any = json.loads(text[start : end + 1])
    except ValueError:
        return None
    value = cast(Json, content).get(name) if isinstance(content, dict) else None
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def normalise(text: str) -> str:
    """Return a normal form of a text. Equal answers that are written differently have the same
    normal form.

    Numbers are compared by value, and other text without regard to case. Spaces, full stops,
    asterisks, backticks and dollar signs at both ends are ignored.

    >>> normalise(" $1,200.0. ") == normalise("1200"), normalise("Yes.")
    (True, 'yes')
    """
    plain = " ".join(text.split()).strip(" .*`$").casefold()
    try:
        return repr(float(plain.replace(",", "")))
    except ValueError:
        return plain
