"""Measure the answers of a step: how alike they are, how many avoid the question, how many tool
calls are broken, and how far a second judge agrees with the rewards.

The functions do no I/O. Their time has a bound, because they look at a limited number of groups,
siblings and words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from fakevllm.guard.detectors import AGREEMENT, EQUAL, IDENTICAL, REFUSALS, TOOL_ERRORS

MAX_GROUPS = 32
"""Maximum number of groups of a step that are measured."""
MAX_SIBLINGS = 8
"""Maximum number of siblings of a group that are measured. Eight siblings have 28 pairs."""
MAX_WORDS = 400
"""Maximum number of words of an answer that are compared."""
MAX_CHARS = 20 * MAX_WORDS
"""Maximum number of characters of an answer in which words are looked for."""
MIN_WORDS = 8
"""Minimum number of words of an answer that is compared with others. Shorter answers, such as `yes`
or a number, are often equal for good reasons."""
SHINGLE_WORDS = 3
"""Number of successive words that are compared as a unit, as in Broder (1997), "On the resemblance
and containment of documents"."""
NEAR_IDENTICAL = 0.8
"""Share of common shingles from which on two answers count as nearly identical."""
BROKEN_TOOL_CALL = "broken_tool_call"
"""Value of the ledger's column `failure` for an answer whose tool call cannot be used."""
_NUM_REFUSAL_CHARS = 200
_NUM_QUESTION_CHARS = 300
_REFUSAL = re.compile(
    r"\b(i('m| am) (sorry|unable|not able)|i (can('|no)t|won't|must decline)|as an ai\b"
    r"|i apologi[sz]e)"
)
_CLARIFYING = re.compile(
    r"\b(could|can|would) you (please )?(clarify|specify|provide|explain|tell me|share|elaborate)"
    r"|\bwhat (exactly )?do you mean\b|\bplease (clarify|specify|provide)"
    r"|\bmore (details|context|information)\b"
)


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One answer of a group, with what the guard measures of it."""

    text: str | None
    reward: float | None = None
    has_tool_call: bool = False
    failure: str | None = None
    second_score: float | None = None
    """Score of the second judge; None if there is none."""


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """A request with its answers."""

    question: str
    answers: Sequence[MeasuredAnswer]


def answer_figures(groups: Sequence[MeasuredGroup]) -> dict[str, float]:
    """Return the figures of a step's answers, by name. A figure that nothing was measured for is
    absent."""
    groups = [
        MeasuredGroup(group.question, group.answers[:MAX_SIBLINGS]) for group in groups[:MAX_GROUPS]
    ]
    answers = [answer for group in groups for answer in group.answers]
    texts = [answer.text for answer in answers if answer.text]
    calls = [one for one in answers if one.has_tool_call or one.failure == BROKEN_TOOL_CALL]
    measured = {
        IDENTICAL: [pair for group in groups for pair in _identical_pairs(group)],
        EQUAL: list(_equal_answers(groups)),
        REFUSALS: [avoids_question(text) for text in texts],
        TOOL_ERRORS: [one.failure == BROKEN_TOOL_CALL for one in calls],
        AGREEMENT: [pair for group in groups for pair in _agreements(group)],
    }
    return {name: fmean(values) for name, values in measured.items() if values}


def avoids_question(text: str) -> bool:
    """Return True if an English answer refuses, or ends with a question that asks the user to be
    clearer.

    >>> avoids_question("I'm sorry, but I can't help with that."), avoids_question("It is 42.")
    (True, False)
    >>> avoids_question("Which of them? Could you clarify what you need?")
    True
    """
    plain = text.strip().replace("\u2019", "'").lower()
    if _REFUSAL.search(plain[:_NUM_REFUSAL_CHARS]):
        return True
    return plain.endswith("?") and _CLARIFYING.search(plain[-_NUM_QUESTION_CHARS:]) is not None


def _words(text: str | None) -> list[str]:
    """Return the first words of an answer in lower case. Return [] if the answer is too short to be
    compared."""
    words = re.findall(r"\w+", (text or "")[:MAX_CHARS].lower())[:MAX_WORDS]
    return words if len(words) >= MIN_WORDS else []


def _identical_pairs(group: MeasuredGroup) -> Iterator[bool]:
    """Yield for each pair of siblings whether they are nearly identical."""
    shingles = [
        {tuple(words[at : at + SHINGLE_WORDS]) for at in range(len(words) - SHINGLE_WORDS + 1)}
        for answer in group.answers
        if (words := _words(answer.text))
    ]
    for one, other in combinations(shingles, 2):
        yield len(one & other) >= NEAR_IDENTICAL * len(one | other)


def _equal_answers(groups: Sequence[MeasuredGroup]) -> Iterator[bool]:
    """Yield for each answer whether a group with another question has the same answer. Yield
    nothing if all groups have the same question."""
    if len({group.question for group in groups}) < 2:
        return
    texts = [
        (group.question, " ".join(words))
        for group in groups
        for answer in group.answers
        if (words := _words(answer.text))
    ]
    questions: defaultdict[str, set[str]] = defaultdict(set)
    for question, text in texts:
        questions[text].add(question)
    for _, text in texts:
        yield len(questions[text]) > 1


def _agreements(group: MeasuredGroup) -> Iterator[bool]:
    """Yield for each pair of siblings whether the second judge puts them in the order of their
    rewards. A pair with equal rewards or equal scores is left out."""
    scored = [
        (answer.reward, answer.second_score)
        for answer in group.answers
        if answer.reward is not None and answer.second_score is not None
    ]
    for (reward, score), (other_reward, other_score) in combinations(scored, 2):
        if reward != other_reward and score != other_score:
            yield (reward > other_reward) == (score > other_score)
