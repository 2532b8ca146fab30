"""Reward answers only by what users do after an answer: give thumbs or a score, correct the answer,
or send a next message.

Without feedback, all answers of a group get the same reward, so the group trains nothing.
`window_s` is a setting in the section `[feedback]` of the configuration. Feedback that arrives
within `window_s` seconds changes the reward of the answer in its group. Later feedback becomes a
training sample of its own. An answer without feedback does not count as bad.
"""

from __future__ import annotations

import re

from fakevllm.hooks.spec import Feedback, Json, Sibling

REGENERATE: float | None = -0.5
"""Value of an answer if the user requested another answer to the same question. None means that the
first answer gets no value."""
WRONG = re.compile(
    r"(that's|that is|this is|it's) (wrong|not right|incorrect)|not what i|try again"
    r"|^no([.!]|, (?!thank|it'?s? (is )?(fine|ok)|problem|worries))"
)
"""Regex of a complaint. It is searched in the first sentence of the user's next message."""
THANKS = re.compile(
    r"(thanks?( you)?( a lot| so much)?|perfect|great|that works)[^\w?']*($|[.!,;\n])"
)
"""Regex of thanks. It must match the first sentence of the user's next message, or the part of this
sentence before a comma or semicolon."""
NEXT_MESSAGE = 0.5
"""Value of an answer if the user's next message contains thanks. If the next message is a
complaint, the value is -NEXT_MESSAGE.
"""
_SENTENCE = re.compile(r"[^.!?\n]*[.!?]?")
EDITED: float | None = -0.5
"""Value of an answer if the user corrected the answer. None means that the answer gets no value.
The ledger stores the corrected text in both cases."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    return [0.0] * len(all_answers)


def on_feedback(feedback: Feedback) -> float | None:
    if feedback.kind == "regenerate":
        return REGENERATE
    if feedback.kind == "next_message":
        return value_of_next_message(feedback.next_message)
    if feedback.score is not None:
        return feedback.score
    if feedback.thumbs is not None:
        return 1.0 if feedback.thumbs == "up" else -1.0
    return EDITED if feedback.edited is not None else None


def value_of_next_message(text: str) -> float | None:
    """Return the value of an answer, judged by the user's next message. Edit this function for your
    own criterion.

    The value is None for most messages, because most messages say nothing about the answer.

    >>> [value_of_next_message(text) for text in ("Thanks a lot!", "No, it is 7.", "And 2?")]
    [0.5, -0.5, None]
    >>> [value_of_next_message(text) for text in ("Great, but that's wrong.", "Greatest of 8?")]
    [-0.5, None]
    """
    match = _SENTENCE.match(text.strip().casefold().replace("\u2019", "'"))
    sentence = match.group() if match else ""
    if WRONG.search(sentence):
        return -NEXT_MESSAGE
    return NEXT_MESSAGE if THANKS.match(sentence) else None
