"""A page of tokens: a group or an episode as training sees it. Pure.

An advantage is the one of the step that trained the answer, as the server told it: the mean over
the answer's tokens, which for most algorithms is that of each. Nothing here computes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fakevllm.ledger.records import GroupRecord
from fakevllm_adapters.protocol.packed_numbers import unpack_floats, unpack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall
from fakevllm_adapters.protocol.token_view import CallView, GroupView


@dataclass(frozen=True, slots=True)
class Token:
    """
    >>> Token(7, is_trained=True, logprob=-0.5, advantage=1.0).id
    7
    """

    id: int
    is_trained: bool
    """The mask: whether it is in the loss."""
    logprob: float | None = None
    """As the engine sampled it; None in a prompt."""
    advantage: float | None = None
    """None where it is not in the loss, or not known."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model."""

    prompt: Sequence[Token]
    answer: Sequence[Token]
    notes: Sequence[str]
    """Version, temperature, how it ended, why it does not train."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One sibling, or one episode."""

    name: str
    reward: float | None
    advantage: float | None
    is_trained: bool
    is_served: bool
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    question: str
    facts: Sequence[str]
    answers: Sequence[Answer]
    notes: list[str] = field(default_factory=list[str])
    """What is missing, and where to have it from."""

    @property
    def tokens(self) -> Iterator[Token]:
        for answer in self.answers:
            for turn in answer.turns:
                yield from turn.prompt
                yield from turn.answer

    @property
    def largest_advantage(self) -> float:
        """Of either sign; 1 where there is none, to divide by."""
        return max((abs(one.advantage) for one in self.tokens if one.advantage), default=1.0)


def of_ledger(
    group: GroupRecord, calls: Mapping[int, Sequence[CapturedCall]], index: int | None
) -> Page:
    """`index`: of the only sibling asked for."""
    answers = [
        Answer(
            name=f"sibling {one.index}",
            reward=one.reward,
            advantage=one.advantage,
            is_trained=one.trained,
            is_served=one.served,
            turns=[_turn(call, one.trained, one.advantage) for call in calls.get(one.index, ())],
        )
        for one in group.siblings
        if index is None or one.index == index
    ]
    facts = _outcome(group.state, group.reason, group.trained_step, group.trained_version)
    return Page(f"group {group.group_id}", group.question, facts, answers)


def of_server(group: GroupView) -> Page:
    answers = [
        Answer(
            name=f"episode {one.name}" if "/" not in one.name else f"sibling {one.index}",
            reward=one.reward,
            advantage=one.advantage,
            is_trained=one.is_trained,
            is_served=False,
            turns=[_turn(call, one.is_trained, one.advantage) for call in one.calls],
        )
        for one in group.siblings
    ]
    facts = _outcome(group.state, group.reason, group.step, group.version)
    return Page(f"group {group.group_id}", "", facts, answers)


def _outcome(state: str, reason: str | None, step: int | None, version: int | None) -> list[str]:
    facts = [state if reason is None else f"{state}: {reason}"]
    if step is not None:
        facts.append(f"step {step}")
    if version is not None:
        facts.append(f"made version {version}")
    return facts


def _turn(call: CapturedCall, is_trained: bool, advantage: float | None) -> Turn:
    ids = unpack_ids(call.response_ids)
    logprobs = [] if call.logprobs is None else unpack_floats(call.logprobs)
    is_in = is_trained and call.untrainable is None
    answer: list[Token] = []
    for place, id in enumerate(ids):
        logprob = logprobs[place] if place < len(logprobs) else None
        own = is_in and not _is_forced(call, place, logprob)
        answer.append(Token(id, own, logprob, advantage if own else None))
    prompt = [Token(id, is_trained=False) for id in unpack_ids(call.prompt_ids)]
    return Turn(prompt, answer, _notes(call))


def _is_forced(call: CapturedCall, place: int, logprob: float | None) -> bool:
    """Whether nothing else could have been sampled. The server knows; the ledger has the
    log-probability of such a token, which is 0."""
    if isinstance(call, CallView):
        return place in call.forced
    return call.shaped and logprob == 0


def _notes(call: CapturedCall) -> list[str]:
    versions = sorted({span[0] for span in call.weight_versions})
    told = [f"version {'–'.join(str(one) for one in versions)}"] if versions else []
    told += [f"temperature {call.temperature:g}"]
    told += [f"ended by {call.finish_reason}"] if call.finish_reason else []
    return told + ([f"not trained: {call.untrainable}"] if call.untrainable else [])


def headed(answer: Answer) -> str:
    """
    >>> headed(Answer("sibling 0", 1.0, 0.75, True, True, []))
    'sibling 0, reward 1, advantage +0.75, served'
    """
    said = [answer.name]
    said += [] if answer.reward is None else [f"reward {answer.reward:g}"]
    said += [] if answer.advantage is None else [f"advantage {answer.advantage:+.3g}"]
    said += ["served"] if answer.is_served else []
    return ", ".join(said + ([] if answer.is_trained else ["not in the loss"]))


def numbers(token: Token) -> tuple[str, str]:
    """Log-probability and advantage.

    >>> numbers(Token(1, True, logprob=-0.00001, advantage=0.5))
    ('0.0000', '+0.5000')
    """
    logprob = "–" if token.logprob is None else f"{token.logprob:z.4f}"
    return logprob, "–" if token.advantage is None else f"{token.advantage:+.4f}"
