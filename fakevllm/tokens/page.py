"""The data of a page that shows the tokens of a group or an episode as the trainer sees them. A
group is a request with its sampled answers (siblings). This module does no I/O.

The page shows one advantage per sibling or episode: the mean advantage of its trained tokens. The
server reports this mean for the training step. With most algorithms, all trained tokens of a
sibling have the same advantage. This package computes no advantages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fakevllm.ledger.records import GroupRecord
from fakevllm_adapters.protocol.group_tokens import CallView, GroupView
from fakevllm_adapters.protocol.packed_numbers import unpack_floats, unpack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a prompt or of a response.

    >>> Token(7, is_trained=True, logprob=-0.5, advantage=1.0).id
    7
    """

    id: int
    is_trained: bool
    """Whether the token is in the loss, as the loss mask says."""
    logprob: float | None = None
    """Log-probability that the engine reported for a sampled token; None for a prompt's token."""
    advantage: float | None = None
    """Advantage of the token; None if the token is not in the loss or the advantage is unknown."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of one model call."""

    prompt: Sequence[Token]
    response: Sequence[Token]
    notes: Sequence[str]
    """Weight versions, replica, temperature, finish reason, and the reason why the call is not
    trained, if any."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one sibling (an answer that was sampled for a request) or of one episode."""

    name: str
    reward: float | None
    advantage: float | None
    is_trained: bool
    is_served: bool
    """Whether the app got this sibling's answer."""
    calls: Sequence[CallTokens]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    question: str
    """The user's question, as the ledger has it; "" for a page from the server."""
    facts: Sequence[str]
    """State of the group, training step, and the version of the weights after the step."""
    samples: Sequence[Sample]
    notes: list[str] = field(default_factory=list[str])
    """Hints about missing data and how to get them."""

    @property
    def tokens(self) -> Iterator[Token]:
        for sample in self.samples:
            for call in sample.calls:
                yield from call.prompt
                yield from call.response

    @property
    def largest_advantage(self) -> float:
        """The largest absolute advantage of the page's tokens; 1 if no token has an advantage. A
        token with this advantage gets a colour of full strength."""
        return max((abs(token.advantage) for token in self.tokens if token.advantage), default=1.0)


def ledger_page(
    group: GroupRecord, calls: Mapping[int, Sequence[CapturedCall]], index: int | None
) -> Page:
    """Return the page that shows the tokens of a group from the ledger, the proxy's database.

    `calls` maps the index of each sibling (sampled answer) to the sibling's captured model calls.
    If `index` is not None, only the sibling with this index is shown.
    """
    samples = [
        Sample(
            name=f"sibling {sibling.index}",
            reward=sibling.reward,
            advantage=sibling.advantage,
            is_trained=sibling.trained,
            is_served=sibling.served,
            calls=[
                _call_tokens(call, sibling.trained, sibling.advantage)
                for call in calls.get(sibling.index, ())
            ],
        )
        for sibling in group.siblings
        if index is None or sibling.index == index
    ]
    facts = _outcome(group.state, group.reason, group.trained_step, group.trained_version)
    return Page(f"group {group.group_id}", group.question, facts, samples)


def server_page(group: GroupView) -> Page:
    """Return the page that shows the tokens of a group. The server has sent the group's data."""
    samples = [
        Sample(
            name=f"sibling {view.index}" if "/" in view.name else f"episode {view.name}",
            reward=view.reward,
            advantage=view.advantage,
            is_trained=view.is_trained,
            is_served=False,
            calls=[_call_tokens(call, view.is_trained, view.advantage) for call in view.calls],
        )
        for view in group.siblings
    ]
    facts = _outcome(group.state, group.reason, group.step, group.version)
    return Page(f"group {group.group_id}", "", facts, samples)


def _outcome(state: str, reason: str | None, step: int | None, version: int | None) -> list[str]:
    facts = [state if reason is None else f"{state}: {reason}"]
    if step is not None:
        facts.append(f"step {step}")
    if version is not None:
        facts.append(f"made version {version}")
    return facts


def _call_tokens(call: CapturedCall, is_trained: bool, advantage: float | None) -> CallTokens:
    """Return the tokens of a model call. `is_trained` and `advantage` are those of the sibling
    (sampled answer) or episode to which the call belongs."""
    logprobs = [] if call.logprobs is None else unpack_floats(call.logprobs)
    is_call_trained = is_trained and call.untrainable is None
    response: list[Token] = []
    for position, id in enumerate(unpack_ids(call.response_ids)):
        logprob = logprobs[position] if position < len(logprobs) else None
        is_in_loss = is_call_trained and not _is_forced(call, position, logprob)
        response.append(Token(id, is_in_loss, logprob, advantage if is_in_loss else None))
    prompt = [Token(id, is_trained=False) for id in unpack_ids(call.prompt_ids)]
    return CallTokens(prompt, response, _notes(call))


def _is_forced(call: CapturedCall, position: int, logprob: float | None) -> bool:
    """Return True if no other token could have been sampled at this position of the answer.

    The server reports which tokens were forced, but the ledger does not store this. For a call from
    the ledger, a token therefore counts as forced if a grammar constrained the answer and the
    token's log-probability is 0.
    """
    if isinstance(call, CallView):
        return position in call.forced
    return call.shaped and logprob == 0


def _notes(call: CapturedCall) -> list[str]:
    versions = sorted({span[0] for span in call.weight_versions})
    notes = [f"version {'–'.join(str(version) for version in versions)}"] if versions else []
    notes += [] if call.replica is None else [call.replica]
    notes += [f"temperature {call.temperature:g}"]
    notes += [f"ended by {call.finish_reason}"] if call.finish_reason else []
    return notes + ([f"not trained: {call.untrainable}"] if call.untrainable else [])


def heading(sample: Sample) -> str:
    """Return the heading of a sample (a sibling or an episode): its name, reward and advantage. The
    word "served" is added if the app got this sample as its answer. The words "not in the loss" are
    added if the sample was not trained.

    >>> heading(Sample("sibling 0", 1.0, 0.75, True, True, []))
    'sibling 0, reward 1, advantage +0.75, served'
    """
    parts = [sample.name]
    parts += [] if sample.reward is None else [f"reward {sample.reward:g}"]
    parts += [] if sample.advantage is None else [f"advantage {sample.advantage:+.3g}"]
    parts += ["served"] if sample.is_served else []
    return ", ".join(parts + ([] if sample.is_trained else ["not in the loss"]))


def format_values(token: Token) -> tuple[str, str]:
    """Return two texts: the token's log-probability and its advantage. An unknown number is shown
    as `–`.

    >>> format_values(Token(1, True, logprob=-0.00001, advantage=0.5))
    ('0.0000', '+0.5000')
    """
    logprob = "–" if token.logprob is None else f"{token.logprob:z.4f}"
    return logprob, "–" if token.advantage is None else f"{token.advantage:+.4f}"
