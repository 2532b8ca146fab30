"""The tokens of one answer, as the page Group shows them. The module does no I/O.

The pages of the console cannot have styles of their own, so the colour of a token is one of a few
classes of the style sheet. `fakevllm tokens` shows the same tokens, with their prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fakevllm.console.sources.server_status import ServerView
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.records import EVAL_KIND, GroupRecord, State
from fakevllm.ledger.redacted_records import REDACTED
from fakevllm.tokens.colours import BAD, GOOD, ColourBy, colour, shade
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.page import CallTokens, Sample, Token, format_values

MAX_TOKENS = 2_000
"""Maximum number of tokens of one answer that are shown. A browser needs an element for each."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with its text and its classes of the style sheet."""

    id: int
    text: str
    """Text of the token, in which each line end is marked. The id in brackets if the text is
    unknown."""
    classes: str
    logprob: str
    advantage: str
    is_trained: bool

    @property
    def title(self) -> str:
        mask = "in the loss" if self.is_trained else "not in the loss"
        return f"id {self.id}, logprob {self.logprob}, advantage {self.advantage}, {mask}"


@dataclass(frozen=True, slots=True)
class ShownCall:
    """The shown tokens of one model call."""

    notes: Sequence[str]
    tokens: Sequence[ShownToken]
    num_hidden: int
    """Number of tokens that are not shown."""


def largest_advantage(group: GroupRecord) -> float:
    """Return the largest absolute advantage of the group's answers, which is shown with the colour
    of full strength. Return 1 if no answer has an advantage."""
    advantages = (abs(sibling.advantage or 0.0) for sibling in group.siblings if sibling.trained)
    return max(advantages, default=0.0) or 1.0


def shown_ids(sample: Sample) -> set[int]:
    """Return the ids of the tokens that are shown of an answer."""
    return {token.id for _, tokens in _cut(sample) for token in tokens}


def shown_calls(sample: Sample, texts: TokenTexts, largest: float) -> list[ShownCall]:
    """Return the shown tokens of an answer, call by call. `largest` is the absolute advantage that
    is shown with the colour of full strength."""
    return [
        ShownCall(
            (*call.notes, f"prompt of {len(call.prompt):,} tokens"),
            [_shown(token, texts, largest) for token in tokens],
            len(call.response) - len(tokens),
        )
        for call, tokens in _cut(sample)
    ]


def token_classes(token: Token, largest: float) -> str:
    """Return the classes of a token. `good-N` and `bad-N` are the shades of its advantage, and
    `odd-N` is the shade of its surprise. `out` marks a token that is not in the loss.

    >>> token_classes(Token(1, True, logprob=-9.0, advantage=-1.0), 1.0)
    't bad-8 odd-8'
    >>> token_classes(Token(1, False, logprob=0.0), 1.0)
    't out'
    """
    classes = ["t"]
    if (by_advantage := colour(token, ColourBy.ADVANTAGE, largest)) is not None:
        name = {GOOD: "good", BAD: "bad"}[by_advantage[0]]
        classes.append(f"{name}-{shade(by_advantage[1])}")
    by_logprob = colour(token, ColourBy.LOGPROB, largest)
    if by_logprob is not None and by_logprob[1] > 0:
        classes.append(f"odd-{shade(by_logprob[1])}")
    return " ".join(classes if token.is_trained else [*classes, "out"])


def missing_tokens(
    group: GroupRecord, cause: Cause | None, untrainable: Collection[str | None] = ()
) -> str:
    """Return the reason why the ledger has no tokens of an answer, as a sentence. `cause` says why
    the contents of the group were deleted. It is None if they were not deleted. `untrainable` are
    the reasons why the calls of the answer cannot be trained."""
    if REDACTED in untrainable:
        return "The tokens are not stored, because the request or the answer has redacted texts."
    if group.kind == EVAL_KIND:
        return "The ledger has no tokens of this group, because evaluations do not keep them."
    if cause is Cause.PRUNED:
        return (
            "The tokens are no longer kept: the contents of this group were deleted, because the "
            "ledger has a limit of age or size."
        )
    if cause is Cause.FORGOTTEN:
        return "The tokens were deleted with `fakevllm forget`, as all contents of this group."
    if group.state == State.SCORED:
        return "The tokens arrive when the server has acknowledged the rewards of this group."
    if group.num_siblings == 1:
        return "The ledger has no tokens of a request that was sampled only once."
    return (
        "The ledger has no tokens of this group: it was dropped before its end, or the server did "
        "not send them."
    )


def run_problem(group: GroupRecord, view: ServerView) -> str:
    """Return the reason why the server's engine cannot decode the tokens of a group, as a sentence.
    Return an empty text if the engine runs for the training run of the group. An engine of another
    run may have another model, which would decode the ids to wrong texts."""
    if view.status is None:
        return f"Texts are missing: {view.problem}"
    if group.run_id and group.run_id == view.status.run_id:
        return ""
    return (
        f"Texts are missing: this group is not known to belong to the present run of the server at "
        f"{view.url}, whose model may have other tokens. `fakevllm tokens ID --model FOLDER` reads "
        "the texts from the folder of the group's model."
    )


def _cut(sample: Sample) -> Iterator[tuple[CallTokens, Sequence[Token]]]:
    num_left = MAX_TOKENS
    for call in sample.calls:
        tokens = call.response[:num_left]
        num_left -= len(tokens)
        yield call, tokens


def _shown(token: Token, texts: TokenTexts, largest: float) -> ShownToken:
    text = texts.get(token.id)
    text = f"[{token.id}] " if text is None else text.replace("\n", "⏎\n")
    logprob, advantage = format_values(token)
    classes = token_classes(token, largest)
    return ShownToken(token.id, text, classes, logprob, advantage, token.is_trained)
