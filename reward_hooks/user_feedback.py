"""Users are the judge: nothing but what they say of the answers they got is good or bad.

Every whole answer is worth the same until somebody says something. What is said within
`[feedback] window_s` counts in the answer's own group; what is said later, by itself. A user who
says nothing says nothing bad.
"""

from __future__ import annotations

import re

from fakevllm.hooks.spec import Feedback, Json, Sibling

REGENERATE = -0.5
"""Another answer was asked for; None: that says nothing."""
WRONG = re.compile(
    r"(that's|that is|this is|it's) (wrong|not right|incorrect)|not what i|try again"
    r"|^no([.!]|, (?!thank|it'?s? (is )?(fine|ok)|problem|worries))"
)
"""Anywhere in a next message's first sentence."""
THANKS = re.compile(
    r"(thanks?( you)?( a lot| so much)?|perfect|great|that works)[^\w?']*($|[.!,;\n])"
)
"""All of that sentence, or of its beginning up to a comma."""
NEXT_MESSAGE = 0.5
"""What such a next message says, for good or bad."""
_SENTENCE = re.compile(r"[^.!?\n]*[.!?]?")
EDITED = -0.5
"""The answer had to be corrected; None: that says nothing. The correction itself is kept in the
ledger."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    return [0.0] * len(all_answers)


def on_feedback(feedback: Feedback) -> float | None:
    if feedback.kind == "regenerate":
        return REGENERATE
    if feedback.kind == "next_message":
        return of_next_message(feedback.next_message)
    if feedback.score is not None:
        return feedback.score
    if feedback.thumbs is not None:
        return 1.0 if feedback.thumbs == "up" else -1.0
    return EDITED if feedback.edited is not None else None


def of_next_message(text: str) -> float | None:
    """Yours to write: most of what users write next says nothing of the answer.

    >>> [of_next_message(text) for text in ("Thanks a lot!", "No, it is 7.", "And 2?")]
    [0.5, -0.5, None]
    >>> [of_next_message(text) for text in ("Great, but that's wrong.", "Greatest of 8 and 12?")]
    [-0.5, None]
    """
    found = _SENTENCE.match(text.strip().casefold().replace("\u2019", "'"))
    sentence = found.group() if found else ""
    if WRONG.search(sentence):
        return -NEXT_MESSAGE
    return NEXT_MESSAGE if THANKS.match(sentence) else None
